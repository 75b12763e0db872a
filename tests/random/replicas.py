"""A case of replicas that meet seldom, in one process: each is a run of its own, and after steps they meet.

Formulas as papers print them (spec.sync); sums in the order of the levels' hops, as in `reference`.
"""

from dataclasses import replace

import torch

from lowband.spec.mesh import WORLD
from tests.random.cases import Case, State, Step
from tests.random.observed import Observed
from tests.random.reference import Run, Weights, received, summed


def run_reference(case: Case) -> list[Observed]:
    """What each rank should show."""
    return Run(case).run() if case.sync is None else _Replicas(case).run()


class _Replicas:
    def __init__(self, case: Case) -> None:
        assert case.sync is not None
        self.case, self.sync, self.levels = case, case.sync, case.levels
        self.size = self.levels.size(self.sync.beyond)
        names = self.levels.names[1 : self.levels.index(self.sync.beyond) + 1]
        inside = replace(case, ranks=self.size, inner=tuple((name, self.levels.size(name)) for name in names))
        self.runs = [Run(inside, first) for first in range(0, case.ranks, self.size)]
        self.step, self.is_new = 0, True
        copies = zip(*(run.weights for run in self.runs), strict=True)
        trained = [each for each in copies if each[0].master.requires_grad]
        owners = [module for module in self.runs[0].nets[0].modules() if any(
            of[0].unit[0] is module for of in trained
        )]  # fmt: skip
        kind = _Anchor if self.sync.has_anchor else _Pair
        self.meetings = [kind(of, owners.index(of[0].unit[0]), self) for of in trained]

    def run(self) -> list[Observed]:
        for action in self.case.program:
            if isinstance(action, State) and not self.is_new:  # at first they are equal
                for meeting in self.meetings:
                    meeting.agree()
            for run in self.runs:
                run.act(action)
            self.is_new = self.is_new and not isinstance(action, Step)
            if isinstance(action, Step) and not self.runs[0].seen[0].refused[-1]:
                self._meet()
        return [seen for run in self.runs for seen in run.seen]

    def _meet(self) -> None:
        """What arrives after a step comes before what starts."""
        self.step += 1
        for meeting in self.meetings:
            meeting.arrive(self.step)
            first = (meeting.unit % self.sync.fragments + 1) * self.sync.every // self.sync.fragments
            if self.step >= first and (self.step - first) % self.sync.every == 0:
                meeting.start(self.step + self.sync.delay, (self.step - first) // self.sync.every)
            if not self.sync.delay:
                meeting.arrive(self.step)
        for run in self.runs:
            for weights in run.weights:
                weights.refresh()

    def mean(self, of_replicas: list[torch.Tensor], wire: str) -> torch.Tensor:
        parts = [of_replicas[rank // self.size] for rank in range(self.levels.world)]
        block = self.case.nets[0].scheme.block_size
        return summed(parts, self.levels, (self.sync.beyond, WORLD), wire, torch.float32, block)[0] / len(
            of_replicas
        )

    def sent(self, values: torch.Tensor, wire: str) -> torch.Tensor:
        """What arrives at another replica, if there is one."""
        if not self.levels.hops(self.sync.beyond, WORLD):
            return values
        return received(values, wire, torch.float32, self.case.nets[0].scheme.block_size)


class _Meeting:
    """One parameter's. unit: the place of its unit, which decides on its fragment"""

    def __init__(self, copies: tuple[Weights, ...], unit: int, replicas: _Replicas) -> None:
        self.copies, self.unit, self.replicas, self.sync = copies, unit, replicas, replicas.sync
        self.scheme = replicas.case.nets[0].scheme
        self.arriving: dict[int, list[torch.Tensor]] = {}  # by step: what each replica gets

    @property
    def now(self) -> list[torch.Tensor]:
        return [copy.master.detach().clone() for copy in self.copies]

    def give(self, values: list[torch.Tensor]) -> None:
        for copy, value in zip(self.copies, values, strict=True):
            copy.master.data.copy_(value)


class _Anchor(_Meeting):
    def __init__(self, copies: tuple[Weights, ...], unit: int, replicas: _Replicas) -> None:
        super().__init__(copies, unit, replicas)
        self.anchor = self.now[0]
        self.momentum = torch.zeros_like(self.anchor)
        copies[0].agreed = self.anchor

    def agree(self) -> None:
        """The anchor is up to date."""

    def start(self, arrives: int, _number: int) -> None:
        wire, sync = self.scheme.wire("sync_reduce"), self.sync
        update = self.replicas.mean([self.anchor - own for own in self.now], wire)
        if sync.outer != "average":
            self.momentum.mul_(sync.momentum).add_(update)
            update = update + sync.momentum * self.momentum if sync.outer == "nesterov" else self.momentum
            update = update * sync.learning_rate
        self.arriving[arrives] = [self.replicas.sent(update, wire)]

    def arrive(self, step: int) -> None:
        for update in self.arriving.pop(step, []):
            self.anchor -= update
            mix = self.sync.mix
            self.give([mix * own + (1 - mix) * self.anchor if mix else self.anchor for own in self.now])


class _Pair(_Meeting):
    def agree(self) -> None:
        self.copies[0].agreed = self.replicas.mean(self.now, "native")

    def start(self, arrives: int, number: int) -> None:
        now, wire, sign = self.now, self.scheme.wire("sync_swap"), -1 if self.sync.delay else 1
        self.arriving[arrives] = [
            (self.replicas.sent(now[self._source(i, number)], wire) + sign * own) * 0.5
            for i, own in enumerate(now)
        ]

    def _source(self, replica: int, number: int) -> int:
        """From which one it receives."""
        count = len(self.copies)
        if self.sync.partners == "ring":
            return replica ^ 1 if number % 2 == 0 else (((replica + 1) ^ 1) - 1) % count
        turns = (count - 1).bit_length()
        return (replica - 2 ** (number % turns)) % count

    def arrive(self, step: int) -> None:
        if found := self.arriving.pop(step, []):
            owns = self.now if self.sync.delay else [0.0] * len(found)
            self.give([update + own for update, own in zip(found, owns, strict=True)])
