"""A run at a size that no available machine has: the same engine on torch's fake process group and tensors.

One process plays rank 0. Nothing is computed and nothing is sent; every buffer has its true size and every
collective is called with its true arguments, so the ledger and the memory meter count the bytes that each
rank of the real job would send and hold.
"""

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore

from lowband.engine.api import engine_of
from lowband.run.training_loop import state_peaks
from lowband.spec.records import Outcome, StateBytes
from lowband.spec.run import RunSpec
from lowband.trainers.prepare import prepare
from lowband.trainers.trainer import Trainer

STEPS = 2  # the first step has no new weights to fetch


def count(spec: RunSpec) -> Outcome:
    """Bytes sent by rank 0 in one optimizer step, and bytes held at the peak, by state."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=spec.ranks)
    try:
        with FakeTensorMode():
            trainer = prepare(spec, torch.device("cpu"))
            model, optimizer = trainer.model, trainer.optimizer
            for _ in range(STEPS):
                engine_of(model).ledger.take()
                _step(spec, trainer)
            return Outcome(
                status="ok",
                steps=STEPS,
                sent=tuple(engine_of(model).ledger.take()),
                states=tuple(
                    StateBytes(kind=kind, bytes=held) for kind, held in state_peaks(model, optimizer).items()
                ),
            )
    finally:
        dist.destroy_process_group()


def _step(spec: RunSpec, trainer: Trainer) -> None:
    tokens = torch.zeros(spec.micro_batch, spec.seq_len, dtype=torch.long)
    trainer.accumulate(spec.accumulation, lambda _: trainer.model(tokens, tokens))
    trainer.optimizer.step()
    trainer.optimizer.zero_grad()
