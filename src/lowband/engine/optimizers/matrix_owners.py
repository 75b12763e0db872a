"""Who updates which whole matrix: owners, dealt out by the cost of the update.

Each rank then computes for about as long (arXiv 2309.06497, section 3.1).
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import nn

from lowband.engine.units.shard_of import ShardOf
from lowband.engine.units.unit import Unit
from lowband.spec.partition import intersect, shard_range, shard_ranks


@dataclass
class Matrix:
    """A selected parameter; on its owner, with its whole value.

    level: among whose ranks the owner is chosen: the optimizer's, or one outside it
    """

    unit: Unit
    index: int
    of: ShardOf
    level: str
    owner: int = 0
    whole: nn.Parameter = field(init=False)

    @property
    def shard(self) -> nn.Parameter:
        return self.unit.shards[self.index]

    @property
    def piece(self) -> torch.Tensor:
        """This rank's values, 1D, without padding."""
        return self.shard.detach().as_subclass(torch.Tensor)[: self.of.stop - self.of.start]

    @property
    def givers(self) -> list[int]:
        """The ranks whose shards make up the owner's copy."""
        return shard_ranks(self.unit.levels, self.unit.scheme.optim, self.owner)

    @property
    def is_owned(self) -> bool:
        return self.owner == self.unit.rank

    def own(self, rank: int) -> None:
        self.owner = rank
        if self.is_owned:
            empty = torch.zeros(self.of.shape, dtype=torch.float32, device=self.unit.master.device)
            self.whole = nn.Parameter(self.unit.meter.hold("optim", empty))

    def range_of(self, rank: int) -> slice:
        """The range of the flattened matrix that a rank holds."""
        layout, levels = self.unit.layout, self.unit.levels
        place = layout.ranges()[self.index]
        a, b = intersect(place, shard_range(layout.numel, levels, self.unit.scheme.optim, rank))
        return slice(a - place[0], b - place[0])


def deal(matrices: Sequence[Matrix], costs: Sequence[float]) -> None:
    """Choose owners: the dearest matrix first, each to the rank with the least to do."""
    load: dict[int, float] = {}
    for matrix, cost in sorted(zip(matrices, costs, strict=True), key=lambda pair: -pair[1]):
        ranks = shard_ranks(matrix.unit.levels, matrix.level, matrix.unit.rank)
        owner = min(ranks, key=lambda rank: (load.get(rank, 0.0), rank))
        load[owner] = load.get(owner, 0.0) + cost
        matrix.own(owner)
