"""Attention of a rank's tokens to those of all, whose keys and values come block by block.

Queries stay. A block is the keys and values of the ranks that gather, and travels from rank to rank along the
ring; either may have one rank alone. In the backward the blocks come once more, and the gradients of keys and
values travel behind them, one step late, while the next block is used; a last hop brings them home.

Source: ring attention (arXiv 2310.01889); zigzag as in ring-flash-attention.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from lowband.engine.collectives.context import ContextExchanges, Passing
from lowband.engine.parallel.attend import Seen, backward, forward, in_own_dtypes, wide
from lowband.kernels.spans import of_documents
from lowband.spec.activations import (
    CONTEXT_GATHER,
    CONTEXT_GATHER_AGAIN,
    CONTEXT_RING,
    CONTEXT_RING_AGAIN,
    CONTEXT_RING_GRAD,
    CONTEXT_SCATTER,
)
from lowband.spec.model import AttentionKernel
from lowband.spec.step import Collective

NAME = "attention"


@dataclass(frozen=True)
class What:
    """causal, kernel: see Context.attention; documents: [B, tokens of the sequence], or None

    in_a_row: documents are numbered by their order, and our kernel computes: spans say what a query sees
    """

    exchanges: ContextExchanges
    causal: bool
    scale: float
    documents: torch.Tensor | None
    in_a_row: bool
    kernel: AttentionKernel


class Blocks(torch.autograd.Function):
    """q [B, H, T, D], k and v [B, G, T, D] of this rank's part of the sequence -> [B, H, T, D]."""

    @staticmethod
    @torch._disable_dynamo  # type: ignore[untyped-decorator]
    @in_own_dtypes
    def forward(ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, what: What) -> torch.Tensor:
        walk = _Walk(what, q)
        out = torch.zeros_like(q, dtype=wide(q.dtype), memory_format=torch.contiguous_format)
        lse = torch.full(q.shape[:3], -torch.inf, dtype=wide(q.dtype), device=q.device)
        is_one = walk.is_one
        for step, block in walk.blocks(torch.stack([k, v]), CONTEXT_GATHER, CONTEXT_RING):
            for rows, columns, seen in walk.pairs(step):
                o, own = forward(q[:, :, rows], *_chosen(block, columns), seen, what.scale, what.kernel)
                if is_one:
                    out, lse = o, own
                    continue
                before, both = lse[:, :, rows], torch.logaddexp(lse[:, :, rows], own)
                kept, added = (torch.where(both == -torch.inf, 0, (x - both).exp()) for x in (before, own))
                out[:, :, rows] = out[:, :, rows] * kept.unsqueeze(-1) + o * added.unsqueeze(-1)
                lse[:, :, rows] = both
        out = out.to(q.dtype)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.what = what
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable  # type: ignore[untyped-decorator]
    @in_own_dtypes
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # type: ignore[override]
        q, k, v, out, lse = ctx.saved_tensors
        what: What = ctx.what
        walk, exchanges = _Walk(what, q), what.exchanges
        dq = torch.zeros_like(q, dtype=wide(q.dtype))
        kv = torch.stack([k, v])
        travelling = torch.zeros_like(kv, dtype=wide(q.dtype))  # the gradients of the block that is here
        coming: Passing | None = None  # those of the next one
        for step, block in walk.blocks(kv, CONTEXT_GATHER_AGAIN, CONTEXT_RING_AGAIN):
            found = torch.zeros_like(block, dtype=travelling.dtype)
            for rows, columns, seen in walk.pairs(step):
                merged = out[:, :, rows], lse[:, :, rows]
                qkv = q[:, :, rows], *_chosen(block, columns)
                dout = grad[:, :, rows].contiguous()
                a, b, c = backward(dout, qkv, merged, seen, what.scale, what.kernel)
                dq[:, :, rows] += a
                _add(found, columns, torch.stack([b, c]))
            found = walk.scattered(found)
            if coming is not None:
                travelling = coming.wait()
            travelling += found
            if walk.ring > 1:
                coming = exchanges.pass_on(travelling, CONTEXT_RING_GRAD, NAME)
        if coming is not None:
            travelling = coming.wait()
        dk, dv = travelling.to(k.dtype)
        return dq.to(q.dtype), dk, dv, None


class _Walk:
    """The blocks that come to this rank, in order, and what of them its queries see."""

    def __init__(self, what: What, q: torch.Tensor) -> None:
        self._what, self._exchanges, self._layout = what, what.exchanges, what.exchanges.layout
        self.ring, self.gather = self._layout.ranks("ring"), self._layout.ranks("gather")
        self._mine = q.shape[2]
        self._place = self._exchanges.coordinate("ring")
        self._part = self._place * self.gather + self._exchanges.coordinate("gather")

    @property
    def is_one(self) -> bool:
        """Whether all keys come in one block, of which every query sees those that it sees at once."""
        return self._layout.parts == 1

    def blocks(
        self, kv: torch.Tensor, gather: Collective, ring: Collective
    ) -> Iterator[tuple[int, torch.Tensor]]:
        """By step: keys and values, [2, B, G, tokens, D]. The next ones come while one is used."""
        for step in range(self.ring):
            coming = self._exchanges.pass_on(kv, ring, NAME) if step < self.ring - 1 else None
            block = kv
            if self.gather > 1:
                block = torch.cat([*self._exchanges.gathered(kv, gather, NAME)], dim=3)
            yield step, block
            if coming is not None:
                kv = coming.wait()

    def scattered(self, found: torch.Tensor) -> torch.Tensor:
        """The sum, over the ranks that gather, of the gradients of the block that this rank had."""
        if self.gather == 1:
            return found
        parts = torch.stack(found.chunk(self.gather, dim=3))
        return self._exchanges.scattered(parts, CONTEXT_SCATTER, NAME)

    def pairs(self, step: int) -> Iterator[tuple[slice, list[slice], Seen]]:
        """Rows of queries, columns of the block of a step, and what they see of each other."""
        source, length = (self._place - step) % self.ring, self._mine * self._layout.parts
        here = [
            (run, slice(at, at + run[1] - run[0]))
            for run, at in _places(self._layout.runs(self._part, length))
        ]
        parts = range(source * self.gather, (source + 1) * self.gather)
        there = [run for part in parts for run in self._layout.runs(part, length)]
        columns = [(run, slice(at, at + run[1] - run[0])) for run, at in _places(there)]
        if self._what.in_a_row:  # spans are of keys in the sequence's order
            columns = sorted(columns, key=lambda column: column[0])
        if not self._what.causal:
            everything = [each for _, each in columns]
            for run, rows in here:
                yield rows, everything, self._seen(run, [each for each, _ in columns], False)
            return
        for run, rows in here:
            for before in ([each for each in columns if each[0] == run], [c for c in columns if c[0] < run]):
                if before:
                    seen = [each for each, _ in before]
                    yield rows, [each for _, each in before], self._seen(run, seen, seen == [run])

    def _seen(self, rows: tuple[int, int], columns: list[tuple[int, int]], triangle: bool) -> Seen:
        """Of these columns: of the query's document, if there are any; in a triangle up to its own."""
        documents = self._what.documents
        if documents is None:
            return Seen(triangle)
        mine = documents[:, slice(*rows)]
        theirs = torch.cat([documents[:, slice(*run)] for run in columns], dim=1)
        if self._what.in_a_row:
            return Seen(False, spans=of_documents(mine, theirs, triangle))
        return Seen(triangle, mine.unsqueeze(2) == theirs.unsqueeze(1))


def _places(runs: list[tuple[int, int]]) -> Iterator[tuple[tuple[int, int], int]]:
    at = 0
    for run in runs:
        yield run, at
        at += run[1] - run[0]


def _chosen(block: torch.Tensor, columns: list[slice]) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values of some columns."""
    found = [block[:, :, :, each] for each in columns]
    k, v = found[0] if len(found) == 1 else torch.cat(found, dim=3)
    return k, v


def _add(found: torch.Tensor, columns: list[slice], grads: torch.Tensor) -> None:
    at = 0
    for each in columns:
        length = each.stop - each.start
        found[:, :, :, each] += grads[:, :, :, at : at + length]
        at += length
