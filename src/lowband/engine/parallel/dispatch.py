"""Tokens to the ranks that have their experts, and the experts' outputs back.

    flat     one exchange between all ranks: a row for each pair of a token and an expert
    hops     an exchange level by level, the outermost first: as many rows, in fewer and larger messages
    merged   level by level, and a token goes once to each partner that has experts of its; there the pair's
             weights are known, so that of its outputs one sum returns. Over the slowest links one row
             travels per token and group of ranks, however many experts it has in there

With `flat` a rank's experts see their tokens in the order of one process that has those of all ranks, and
every sum is in its order, too: the same bits.

With parts (Axes.route_parts) a rank's tokens go in so many turns, each as above: while the exchange of one is
on its way, another is computed, and in the backward, which autograd runs in the opposite order, as well.

Kept for the backward, beside what experts keep (expert_products): the rows that come to a rank, and each
pair's output where its weight is known only behind it, without hops, `flat` and `hops`; places of rows.
Nothing of what is on its way, sorted or summed.

Source: HetuMoE (arXiv 2203.14685) for hops; DeepEP for merging, there over two levels in CUDA. Nothing kept
of rows that are sorted or summed: ScatterMoE (arXiv 2403.08245). Parts: FSMoE (arXiv 2501.10714), section 4.
"""

from collections.abc import Callable, Generator, Sequence
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from lowband.engine.collectives.experts import ExpertAxis
from lowband.engine.parallel.exchange import Exchange, ended, started
from lowband.engine.parallel.hot_experts import HotExperts
from lowband.engine.transport.axis import BoundHop
from lowband.spec.activations import (
    ROUTE_BACK,
    ROUTE_BACK_GRAD,
    ROUTE_OUT,
    ROUTE_OUT_GRAD,
    ROUTE_PAIRS,
    ROUTE_WEIGHTS,
    ROUTE_WEIGHTS_GRAD,
)
from lowband.spec.step import Collective

# x [T, H]; [experts of this rank, copies last] int64, pairs of each; by pair, sorted by expert: its row of x,
# int64; its weight, if outputs are to be weighted -> [pairs, H]
Compute = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None], torch.Tensor]
# Of a part of the tokens: it yields while an exchange is on its way, and returns what came of the part.
Way = Generator[None, None, torch.Tensor]

OUT, BACK = (ROUTE_OUT, ROUTE_OUT_GRAD), (ROUTE_BACK, ROUTE_BACK_GRAD)
WEIGHTS, PAIRS = (ROUTE_WEIGHTS, ROUTE_WEIGHTS_GRAD), (ROUTE_PAIRS, ROUTE_PAIRS)


class Dispatch:
    """One layer's way to its experts.

    experts: of all ranks together, numbered in the order of ranks; those of a rank are neighbours
    compute: of this rank's experts
    axis:    None: this rank has all
    hot:     those with copies, whose tokens stay in their group of the outermost level
    """

    def __init__(
        self,
        axis: ExpertAxis | None,
        experts: int,
        compute: Compute,
        name: str,
        hot: HotExperts | None = None,
    ) -> None:
        self._axis, self._experts, self._compute, self._name = axis, experts, compute, name
        self._hot = hot

    def __call__(
        self, x_TH: torch.Tensor, tokens_P: torch.Tensor, experts_P: torch.Tensor, weights_P: torch.Tensor
    ) -> torch.Tensor:
        """[T, H]: by token, the sum of its experts' outputs, weighted; in x's dtype.

        tokens_P, experts_P: pairs, int64; weights_P: theirs. A token may have any number, also none; the
        sum is in the order of its pairs
        """
        if self._axis is None or self._axis.parts == 1:
            return _returned(self._way(x_TH, tokens_P, experts_P, weights_P))
        lengths = [len(part) for part in torch.arange(len(x_TH)).tensor_split(self._axis.parts)]
        ends = torch.tensor(lengths, device=x_TH.device).cumsum(0)
        part_P = torch.bucketize(tokens_P, ends, right=True)
        ways = []
        for part, x in enumerate(x_TH.split(lengths)):
            of = (part_P == part).nonzero().squeeze(1)
            first = ends[part] - lengths[part]
            ways.append(self._way(x, tokens_P[of] - first, experts_P[of], weights_P.index_select(0, of)))
        return torch.cat(_in_turns(ways, 2 * len(self._axis.hops)))

    def _way(
        self, x: torch.Tensor, tokens: torch.Tensor, experts: torch.Tensor, weights: torch.Tensor
    ) -> Way:
        hops = [] if self._axis is None else self._axis.hops
        if self._axis is not None and self._axis.merges:
            return (yield from self._merged(x, tokens, experts, weights, hops, self._experts))
        out = yield from self._each(x, tokens, experts, hops, self._experts)
        return _summed(out, tokens, weights, x)

    def _each(
        self,
        x: torch.Tensor,
        rows: torch.Tensor,
        experts: torch.Tensor,
        hops: Sequence[BoundHop],
        span: int,
        weights: torch.Tensor | None = None,
    ) -> Way:
        """By pair, the output of its expert. span: experts behind the hops; weights: where there are none"""
        if not hops:
            slots, count = self._slots(experts)
            order = slots.argsort(stable=True)
            rows = rows[order]
            counts = torch.bincount(slots, minlength=count)
            found = self._compute(
                x, counts, rows, None if weights is None else weights.index_select(0, order)
            )
            if not len(rows):  # a module of the user's own may compute nothing then
                found = _Joined.apply(found, x, weights)
        else:
            bound, per = hops[0], span // hops[0].hop.count
            partners = self._partners(experts, bound, span)
            order = (partners * self._experts + experts).argsort(stable=True)
            to = torch.bincount(partners, minlength=bound.hop.count).unsqueeze(1)
            (sent,), (came,) = self._counted(to, bound)
            out = self._start(x.index_select(0, rows[order]), sent, came, bound, OUT)
            pairs = self._start(experts[order].int(), sent, came, bound, PAIRS)
            yield
            arrived, of_them = ended(*out), ended(*pairs).long()
            all_ = torch.arange(len(arrived), device=x.device)
            found = yield from self._each(arrived, all_, of_them, hops[1:], per)
            back = self._start(found, came, sent, bound, BACK)
            yield
            found = ended(*back)
        return found.index_select(0, order.argsort())

    def _merged(
        self,
        x: torch.Tensor,
        rows: torch.Tensor,
        experts: torch.Tensor,
        weights: torch.Tensor,
        hops: Sequence[BoundHop],
        span: int,
    ) -> Way:
        """By row of x, the weighted sum of its experts' outputs."""
        if not hops:
            return _summed((yield from self._each(x, rows, experts, (), span, weights)), rows, None, x)
        bound, per = hops[0], span // hops[0].hop.count
        partners, length = self._partners(experts, bound, span), max(len(x), 1)
        # A row goes once to a partner, and its pairs behind it.
        copies, copy_of = (partners * length + rows).unique(return_inverse=True)
        order = copy_of.argsort(stable=True)
        to = torch.bincount(copies // length, minlength=bound.hop.count)
        pairs_to = torch.bincount(partners, minlength=bound.hop.count)
        (sent, pairs_sent), (came, pairs_came) = self._counted(torch.stack([to, pairs_to], 1), bound)
        of_message = copy_of - (to.cumsum(0) - to)[partners]
        pairs = torch.stack([of_message, experts], 1)[order].int()
        of_copy = copies % length
        out = self._start(x.index_select(0, of_copy), sent, came, bound, OUT)
        of_pairs = self._start(pairs, pairs_sent, pairs_came, bound, PAIRS)
        weights = weights.index_select(0, order)
        of_weights = self._start(weights, pairs_sent, pairs_came, bound, WEIGHTS)
        yield
        arrived, theirs, pairs = ended(*out), ended(*of_weights), ended(*of_pairs).long()
        begins = torch.tensor(came).cumsum(0) - torch.tensor(came)
        begin = begins.repeat_interleave(torch.tensor(pairs_came)).to(x.device)
        found = yield from self._merged(arrived, pairs[:, 0] + begin, pairs[:, 1], theirs, hops[1:], per)
        back = self._start(found, came, sent, bound, BACK)
        yield
        return _summed(ended(*back), of_copy, None, x)

    def _partners(self, experts: torch.Tensor, bound: BoundHop, span: int) -> torch.Tensor:
        """By pair, the partner of a hop that has its expert, or leads there."""
        partners = experts % span // (span // bound.hop.count)
        if self._hot is None or not self._hot.hot or span < self._experts:
            return partners
        is_hot = torch.isin(experts, torch.tensor(self._hot.hot, device=experts.device))
        return partners.masked_fill(is_hot, bound.coordinate)

    def _slots(self, experts: torch.Tensor) -> tuple[torch.Tensor, int]:
        """By pair, the number of its expert on this rank; and how many experts that has."""
        if self._axis is None:
            return experts, self._experts
        if self._hot is not None and self._hot.hot:
            return self._hot.slots.to(experts.device)[experts], self._hot.count
        here = self._experts // self._axis.ranks
        return experts % here, here

    def _counted(self, to: torch.Tensor, bound: BoundHop) -> tuple[list[list[int]], list[list[int]]]:
        """By column of counts, those to partners and from them. to: [partners, columns] int64"""
        assert self._axis is not None
        came = self._axis.counts(to, bound, self._name)
        return to.t().tolist(), came.t().tolist()

    def _start(
        self,
        x: torch.Tensor,
        to: Sequence[int],
        came: Sequence[int],
        bound: BoundHop,
        rows: tuple[Collective, Collective],
    ) -> tuple[torch.Tensor, Exchange]:
        """Of a hop, the rows that will have come at its end; rows: of spec.activations, for it and its
        gradient"""
        assert self._axis is not None
        exchange = Exchange(self._axis, bound, rows, to, came, self._name)
        return started(x, exchange), exchange


def _in_turns(ways: Sequence[Way], waits: int) -> list[torch.Tensor]:
    """What they return. waits: how often each yields

    The outermost hop of the next part starts before this one goes on to the start of its last: the slowest
    links are never idle. The same order on every rank.
    """
    for i, _ in enumerate(ways):
        begun = ways[:2] if i == 0 else ways[i + 1 : i + 2]
        for way in begun:
            next(way)
        for _ in range(waits - 1):
            next(ways[i])
    return [_returned(way) for way in ways]


def _returned(way: Way) -> torch.Tensor:
    try:
        while True:
            next(way)
    except StopIteration as end:
        found: torch.Tensor = end.value
        return found


def _summed(
    parts: torch.Tensor, rows: torch.Tensor, weights: torch.Tensor | None, like: torch.Tensor
) -> torch.Tensor:
    """By row of `like`, the sum of its parts, in their order and in fp32 at least; in its dtype."""
    return _Summed.apply(parts, rows, weights, like.shape, like.dtype)  # type: ignore[no-any-return]


class _Summed(torch.autograd.Function):
    """Keeps parts as they are, and only if they are weighted: autograd would keep them in fp32, twice."""

    @staticmethod
    def forward(
        ctx: Any,
        parts: torch.Tensor,
        rows: torch.Tensor,
        weights: torch.Tensor | None,
        shape: torch.Size,
        dtype: torch.dtype,
    ) -> torch.Tensor:
        ctx.save_for_backward(rows, *(() if weights is None else (parts, weights)))
        ctx.wide, ctx.dtype = torch.promote_types(dtype, torch.float32), parts.dtype
        wide = parts.to(ctx.wide) if weights is None else parts.to(ctx.wide) * _column(weights, ctx.wide)
        return wide.new_zeros(shape).index_add(0, rows, wide).to(dtype)

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        rows, *weighted = ctx.saved_tensors
        of_parts, of_weights = grad.to(ctx.wide).index_select(0, rows), None
        if weighted:
            parts, weights = weighted
            if ctx.needs_input_grad[2]:
                of_weights = (of_parts * parts.to(ctx.wide)).sum(1).to(weights.dtype)
            of_parts = of_parts * _column(weights, ctx.wide)
        return of_parts.to(ctx.dtype), None, of_weights, None, None


class _Joined(torch.autograd.Function):
    """`found`, whose backward goes on to the others, too, with zeros: partners await what it sends there."""

    @staticmethod
    def forward(ctx: Any, found: torch.Tensor, x: torch.Tensor, weights: torch.Tensor | None) -> torch.Tensor:
        ctx.save_for_backward(x, weights)
        return found.view_as(found)

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weights = ctx.saved_tensors
        return grad, torch.zeros_like(x), None if weights is None else torch.zeros_like(weights)


def _column(weights: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return weights.to(dtype).unsqueeze(1)
