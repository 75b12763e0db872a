"""Copies of the most loaded experts, so that their tokens need not cross the outermost level.

An expert's copies are on the ranks of its place in the other groups of that level, one in each group. Its
tokens stay in their group and go on as all others do. In each forward the owner sends its weights, and in the
backward it gets the gradients of all copies, which it adds to its own: so copies need no state, no step, and
no place in a checkpoint. Weights of copies stay in memory from the forward to the backward.

Which experts these are follows from the loads of the last steps, which every rank knows.

Source: FSSDP of Hecate, there with a copy on any rank and re-gathered in the backward.
"""

from collections import deque
from collections.abc import Sequence
from typing import Any

import torch

from lowband.engine.collectives.experts import ExpertAxis
from lowband.spec.activations import EXPERT_COPIES, EXPERT_COPIES_GRAD

STEPS = 5  # whose loads count, as Hecate has it


class HotExperts:
    """The experts of a layer that have copies.

    hot:   their numbers among all, in order; the same on every rank
    slots: [experts] int64, by number: where a rank has it, its own first, then copies; of others: anything
    count: that a rank has
    """

    def __init__(self, axis: ExpertAxis, experts: int, most: int) -> None:
        self._axis, self._experts, self._most = axis, experts, most
        self._per = experts // axis.ranks
        self._loads: deque[torch.Tensor] = deque(maxlen=STEPS)
        self.set([])

    def update(self, counts: torch.Tensor) -> None:
        """counts: [experts] int64, pairs of each in a step, over all ranks"""
        self._loads.append(counts.cpu())
        if self._most:
            load = torch.stack([*self._loads]).sum(0)
            order = load.argsort(descending=True, stable=True)[: self._most].tolist()
            self.set(sorted(e for e in order if load[e] * self._experts > load.sum()))

    @property
    def loads(self) -> list[list[int]]:
        """What `update` was given of late: of it again, the same experts have copies."""
        return [load.tolist() for load in self._loads]

    def set(self, hot: Sequence[int]) -> None:
        """Let these have copies from the next forward on. Every rank must set the same ones."""
        self.hot, place = [*hot], self._axis.place
        partners = self._partners()
        self._own = [e for e in self.hot if e // self._per == place]
        self._theirs = [[e for e in self.hot if e // self._per == other] for other in partners]
        here = [*range(place * self._per, (place + 1) * self._per)]
        here += [
            e for other, of_it in zip(partners, self._theirs, strict=True) if other != place for e in of_it
        ]
        self.count, self.slots = len(here), torch.zeros(self._experts, dtype=torch.int64)
        self.slots[here] = torch.arange(self.count)

    def _partners(self) -> list[int]:
        """Places along the axis of the outermost hop's partners, in order."""
        ranks = self._axis.axis.ranks
        if not self._axis.hops:
            return [self._axis.place]
        return [ranks.index(rank) for rank in self._axis.hops[0].hop.partners(self._axis.axis.rank)]

    def weights(self, own: torch.Tensor, name: str) -> torch.Tensor:
        """[count, ...]: of this rank's experts, and of copies. own: [this rank's, ...]"""
        if not self.hot:
            return own
        return torch.cat([own, _Copied.apply(own, self._own, self._theirs, self._axis, name)])


class _Copied(torch.autograd.Function):
    @staticmethod
    @torch._disable_dynamo  # type: ignore[untyped-decorator]
    def forward(
        ctx: Any,
        weights: torch.Tensor,
        own: list[int],
        theirs: list[list[int]],
        axis: ExpertAxis,
        name: str,
    ) -> torch.Tensor:
        bound, per = axis.hops[0], len(weights)
        mine = [e % per for e in own]
        here = bound.coordinate
        to = [0 if i == here else len(mine) for i in range(bound.hop.count)]
        came = [0 if i == here else len(of_it) for i, of_it in enumerate(theirs)]
        ctx.of = mine, to, came, axis, bound, name, weights.shape
        sent = weights[mine].repeat(bound.hop.count - 1, *[1] * (weights.ndim - 1))
        return axis.exchanged(sent, to, came, bound, EXPERT_COPIES, name)

    @staticmethod
    @torch.autograd.function.once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # type: ignore[override]
        mine, to, came, axis, bound, name, shape = ctx.of
        back = axis.exchanged(grad, came, to, bound, EXPERT_COPIES_GRAD, name)
        total = grad.new_zeros(shape)
        if mine:
            total[mine] = back.unflatten(0, (bound.hop.count - 1, len(mine))).sum(0)
        return total, None, None, None, None
