"""A case on ranks: `lowband.shard` and the calls around it, as a user makes them."""

from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

import lowband
from tests.wide import huggingface
from tests.wide.cases import Case
from tests.wide.modules import DTYPE, batch_of, is_unit, loss_of, module_of
from tests.wide.observed import Observed
from tests.wide.optimizers import optimizer_of, schedule_of
from tests.wide.plain import DECAY
from tests.wide.training import train

MODES = {"none": torch.no_grad, "no_grad": torch.no_grad, "inference": torch.inference_mode}


def run_sharded(case: Case, folder: Path) -> Observed:
    """This rank's part; checkpoints go into the folder."""
    side = Sharded(case, folder)
    train(case, side)
    return side.seen


class Sharded:
    def __init__(self, case: Case, folder: Path) -> None:
        self.case, self.folder, self.seen, self.rank = case, folder, Observed(), dist.get_rank()
        self.topology = lowband.Topology(dict(case.levels))
        self._shard(case.scheme)

    def _shard(self, scheme: str, start: int = 0) -> None:
        case = self.case
        self.module: nn.Module = lowband.shard(
            module_of(case, start),
            scheme,
            self.topology,
            is_unit(case),
            DTYPE[case.dtype],
            overlap=case.overlap,
            collectives=case.collectives,
        )
        self.optimizer = optimizer_of(case, self.module.parameters(), is_sharded=True)
        self.schedule = schedule_of(case, self.optimizer)

    def backward(self, step: int) -> None:
        case = self.case
        if case.accumulation == "breadth":
            batches = [batch_of(case, step, micro, self.rank) for micro in range(case.micro_batches)]
            self.seen.losses += lowband.accumulate(
                self.module, batches, lambda batch: loss_of(self.module, case, batch) / case.micro_batches
            )
            return
        for micro in range(case.micro_batches):
            torch.manual_seed(step * 1000 + micro * 100 + self.rank)
            if case.accumulation == "no_sync" and micro < case.micro_batches - 1:
                with lowband.no_sync(self.module):
                    self._micro_batch(step, micro)
            else:
                self._micro_batch(step, micro)

    def _micro_batch(self, step: int, micro: int) -> None:
        case = self.case
        loss = loss_of(self.module, case, batch_of(case, step, micro, self.rank)) / case.micro_batches
        self.seen.losses.append(loss.detach().clone())
        loss.backward()

    def see_gradients(self) -> None:
        named = {name: p for name, p in self.module.named_parameters() if p.requires_grad}
        norms = lowband.norms(list(named.values()), [p.grad for p in named.values()])
        self.seen.gradients.append({name: float(n) for name, n in zip(named, norms, strict=True)})

    def clip(self, max_norm: float) -> None:
        self.seen.clipped.append(float(lowband.clip_grad_norm_(self.module, max_norm)))

    def step(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()
        if self.schedule is not None:
            self.schedule.step()

    def evaluate(self, step: int) -> None:
        self.module.eval()
        with MODES[self.case.evaluation]():
            loss = loss_of(self.module, self.case, batch_of(self.case, step, 7, self.rank))
            self.seen.losses.append(loss.detach().clone())
        self.module.train()

    def generate(self, step: int) -> None:
        self.module.eval()
        tokens = batch_of(self.case, step, 8, self.rank)["input_ids"]
        self.seen.tokens.append(huggingface.generated(self.module, self.case, tokens))
        self.module.train()

    def average(self, start: bool) -> None:
        if start:
            self.averages = {name: p.detach().clone() for name, p in self.module.named_parameters()}
        with torch.no_grad():
            for name, parameter in self.module.named_parameters():
                self.averages[name].lerp_(parameter, DECAY)

    def take_average(self) -> None:
        with torch.no_grad():
            for name, parameter in self.module.named_parameters():
                parameter.copy_(self.averages[name])

    def resume(self) -> None:
        """In a module of other values and under another scheme."""
        checkpointer = lowband.Checkpointer(self.folder)
        checkpointer.save(1, self.module, self.optimizer)
        checkpointer.wait()
        schedule = None if self.schedule is None else self.schedule.state_dict()
        self._shard(self.case.resumed or self.case.scheme, start=1)
        checkpointer.load_newest(self.module, self.optimizer)
        if schedule is not None:
            self.schedule.load_state_dict(schedule)

    def see_state(self) -> None:
        state = lowband.full_state_dict(self.module)
        self.seen.states += [state] if self.rank == 0 else []
