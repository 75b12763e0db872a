"""A run at a size that no available machine has: the same engine on torch's fake process group and tensors.

One process plays one rank. Nothing is computed and nothing is sent; every buffer has its true size and every
collective is called with its true arguments, so the ledger and the memory meter count the bytes that the
rank of the real job would send and hold. All ranks send the same, except that in a flat ring the links to a
rank's successor depend on the rank: then one rank of each kind is played, in turn.
"""

from collections import Counter
from itertools import product
from math import prod

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore

from lowband.errors import UserError
from lowband.spec.mesh import SELF, WORLD
from lowband.spec.records import Outcome, SentRow, StateBytes, by_row, mean, of_rows
from lowband.spec.run import RunSpec
from lowband.trainers.prepare import prepare
from lowband.trainers.trainer import Trainer

LEAST_TORCH = (2, 11)
STEPS = 2  # the first step has no new weights to fetch


def count(spec: RunSpec) -> Outcome:
    """Bytes sent in one step, mean over ranks and a period; bytes held at rank 0's peak, by state.

    Raises UserError with a torch whose fake tensors have no collectives.
    """
    if tuple(map(int, torch.__version__.split(".")[:2])) < LEAST_TORCH:
        raise UserError(
            f"torch {torch.__version__} has no collectives on fake tensors", where=spec.run_id,
            allowed=f"torch {'.'.join(map(str, LEAST_TORCH))} or later",
        )  # fmt: skip
    played = [(_play(spec, rank), alike) for rank, alike in _kinds(spec)]
    totals, period = Counter[SentRow](), spec.scheme.period
    for outcome, alike in played:
        for row, n in by_row(outcome.sent).items():
            totals[row] += int(n) * alike
    sent = {row: mean(total, spec.ranks * period) for row, total in totals.items()}
    return played[0][0].model_copy(update={"sent": of_rows(sent)})


def _kinds(spec: RunSpec) -> list[tuple[int, int]]:
    """Ranks whose bytes stand for all, rank 0 first, and how many ranks each one stands for.

    The links to a successor depend on whether a rank is the last of its partners, hop by hop.
    """
    hops = spec.levels.hops(SELF, WORLD)
    slices = spec.ranks // spec.levels.world
    if spec.collectives == "hops":
        return [(0, spec.ranks)]
    ends = product(*([(0, hop.count - 1), (hop.count - 1, 1)] for hop in hops))
    return [
        (
            sum(hop.stride * place for hop, (place, _) in zip(hops, kind, strict=True)),
            prod(n for _, n in kind) * slices,
        )
        for kind in ends
    ]


def _play(spec: RunSpec, rank: int) -> Outcome:
    """Bytes sent by one rank in one period, and bytes held at the peak, by state."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=spec.ranks)
    try:
        with FakeTensorMode():
            trainer = prepare(spec, torch.device("cpu"))
            for _ in range(STEPS):
                trainer.take_sent()
                _step(spec, trainer)
            sent = {row: n * spec.scheme.period for row, n in by_row(trainer.take_sent()).items()}
            if trainer.replicas is not None:
                for _ in range(2):  # in the first period less arrives
                    trainer.take_sent()
                    for _ in range(spec.scheme.period):
                        trainer.replicas.advance()
                sent |= by_row(trainer.take_sent())
            return Outcome(
                status="ok",
                steps=STEPS,
                sent=of_rows(sent),
                states=tuple(
                    StateBytes(kind=kind, bytes=held) for kind, held in trainer.state_peaks().items()
                ),
            )
    finally:
        dist.destroy_process_group()


def _step(spec: RunSpec, trainer: Trainer) -> None:
    tokens = torch.zeros(spec.micro_batch, spec.seq_len, dtype=torch.long)
    trainer.accumulate(spec.accumulation, lambda _: (tokens, tokens))
    trainer.optimizer.step()
    trainer.optimizer.zero_grad()
