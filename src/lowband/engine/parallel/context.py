"""Long sequences: their tokens over the ranks along context, and exact attention between all of them.

[Note: sums] Ranks along context hold the same parameters and see different tokens. They lie along the data
axis, over which the engine averages gradients whatever tokens a rank had. So a loss must not divide by a
rank's own number of tokens: `Context.mean` divides by the number over all ranks along data, context's among
them, and nothing else divides. Gradients of keys and values are summed over context, never averaged.
"""

import math
from collections.abc import Mapping
from typing import Any, get_args

import torch
from torch import nn

from lowband.engine.collectives.activations import Along
from lowband.engine.collectives.context import ContextExchanges
from lowband.engine.collectives.states import StateExchanges
from lowband.engine.parallel.blocks import NAME, Blocks, What
from lowband.engine.parallel.left_out import LeftOut, in_order
from lowband.engine.parallel.linear import linear_attention
from lowband.engine.parallel.routing import Router
from lowband.engine.passes.alike import Alike
from lowband.engine.transport.consistency import check_same, is_alone
from lowband.engine.transport.ledger import Ledger
from lowband.engine.transport.topology import Topology
from lowband.errors import UserError
from lowband.kernels.spans import numbered
from lowband.spec.activations import CONTEXT_DOCUMENTS, CONTEXT_HEADS, CONTEXT_HEADS_GRAD, TOKENS_COUNT
from lowband.spec.context import Layout, ways_of
from lowband.spec.mesh import WORLD
from lowband.spec.model import AttentionKernel
from lowband.spec.step import StatesOption

WHERE = "Context.attention"


class Context:
    """The ranks along a topology's context axis, which divide the tokens of their sequences.

    attention: how they attend: a way for all levels, or one by level that they cross, from the inside heads,
               then gather, then ring, e.g. {"package": "heads", "world": "ring"}; default: what the
               topology's axes say
    zigzag:    whether each has an early and a late part of the sequence; default: likewise
    states:    how those of linear layers travel: `pass`, `gather` or `scan`; default: likewise, and with the
               way `state` by scan. Given beside another way, that is of the layers between them

    They must be given the same sequences, and take their tokens with `split`: inputs, targets (shifted
    before), positions, documents. Everything that is no attention sees one token at a time and needs nothing.
    On an axis of one rank all tokens are its, and nothing is sent. Every rank must make this, in the same
    order, because that creates process groups.
    Raises UserError for ways that do not fit the levels or zigzag, and, on every rank, if ranks differ in
    them.
    """

    def __init__(
        self,
        topology: Topology,
        attention: str | Mapping[str, str] | None = None,
        zigzag: bool | None = None,
        states: StatesOption | None = None,
    ) -> None:
        axes, axis = topology.axes, topology.along("context")
        ways = ways_of(axes.context_attention if attention is None else attention, axis.levels)
        states = axes.context_states if states is None else states
        if states not in (allowed := get_args(StatesOption)):
            raise UserError(f"unknown way '{states}'", where="context_states", allowed=allowed)
        self.layout = Layout(axis.levels, ways, axes.zigzag if zigzag is None else zigzag, states)
        if not is_alone():
            given = {"ways of context": dict(ways), "zigzag": self.layout.zigzag, "states": states}
            check_same(given)
        self._place, self._ranks = axis.place, len(axis.ranks)
        self._axis, self._is_compared = axis, self._ranks == 1 or is_alone()
        self._left_out = LeftOut(self._is_compared, axes.pipeline == 1)
        self._given: torch.Tensor | None = None  # the first that was split
        self._has_added = False  # to the last that was, tokens at the end
        self._exchanges = ContextExchanges(axis, self.layout)
        travels = self.layout.travels
        self._states = None if travels is None else StateExchanges(self._exchanges, travels)
        self._all = Along(topology.along("data"))
        self._averaged: str | None = None
        self._all.count_in(self._exchanges.ledger)

    def __deepcopy__(self, memo: object) -> "Context":
        """Itself: a copy of a module that has it, say a teacher, attends over the same ranks."""
        return self

    @property
    def ledger(self) -> Ledger:
        """Where the bytes that its exchanges send are counted."""
        return self._exchanges.ledger

    def bind(self, module: nn.Module) -> None:
        """Count where the module's other exchanges are counted; before `lowband.shard`.

        Raises UserError for modules that need their tokens in order, or all of them.
        """
        for where, what in in_order(module) if self._ranks > 1 else ():
            raise UserError(what, where=where, allowed="modules that see one token at a time")
        module._lowband_context = self  # type: ignore[assignment]
        for router in module.modules():
            if isinstance(router, Router):
                router.has_added = lambda: self._has_added

    def count_in(self, ledger: Ledger, averaged: str | None = None) -> None:
        """Count what is sent from now on in another ledger.

        averaged: the level over whose groups gradients of its losses are averaged in every step, if known
        Raises UserError for another one than before.
        """
        if None not in (averaged, self._averaged) and averaged != self._averaged:
            what = f"is bound to modules that average over '{self._averaged}' and over '{averaged}'"
            raise UserError(what, where="a Context", allowed="one of its own for each of them")
        self._averaged = averaged or self._averaged
        self._exchanges.count_in(ledger)
        self._all.count_in(ledger)

    # ---- tokens

    def positions(self, tokens: int, device: torch.device | None = None) -> torch.Tensor:
        """Positions of this rank's tokens, [its tokens] int64, those behind the end included.

        tokens: of the whole sequence
        """
        found = self._positions(tokens, device)
        self._left_out.split(len(found))
        return found

    def _positions(self, tokens: int, device: torch.device | None) -> torch.Tensor:
        return torch.tensor(self.layout.positions(self._place, self._padded(tokens)), device=device)

    def places(self, x: torch.Tensor) -> torch.Tensor:
        """The same of tokens that were split. x: [B, its tokens, ...]

        Raises UserError for so many tokens as no split gives.
        """
        self._check_tokens(x.shape[1], "Context.places")
        self._left_out.compare_length("places", x.shape[1])
        return self._positions(x.shape[1] * self._ranks, x.device)

    def split(self, x: torch.Tensor, dim: int = 1, fill: float = 0) -> torch.Tensor:
        """This rank's tokens of a tensor that has all of them, in its order.

        fill: of tokens that are added at the end, until all ranks have equally many. Of targets give the
              index that the loss ignores, of documents -1
        """
        tokens = x.shape[dim]
        if not self._is_compared and self._given is None and not x.is_floating_point():
            self._given = x.clone()  # a loader may fill its buffer anew before the first loss
        missing = self._padded(tokens) - tokens
        self._has_added = missing > 0
        if missing:
            shape = [*x.shape]
            shape[dim] = missing
            x = torch.cat([x, x.new_full(shape, fill)], dim)
        return x.index_select(dim, self.positions(tokens, x.device))

    def _padded(self, tokens: int) -> int:
        if tokens < self._ranks:
            what = f"{tokens} tokens are too few for {self._ranks} ranks along context"
            raise UserError(what, where="a sequence", allowed=f"{self._ranks} or more")
        return self.layout.padded(tokens)

    # ---- attention

    def attention(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        causal: bool = True,
        scale: float | None = None,
        documents: torch.Tensor | None = None,
        tokens: int | None = None,
        kernel: AttentionKernel = "sdpa",
    ) -> torch.Tensor:
        """Softmax attention of this rank's tokens to those of the whole sequence: [B, H, T, D], as q.

        q:         [B, H, T, D]; k, v: [B, G, T, D], H a multiple of G; of the tokens that `split` gives
        scale:     default 1 / sqrt(D)
        documents: [B, T] int64 of these tokens: each attends to its own document alone
        tokens:    of the whole sequence, before it was split; only needed where no mask hides those added
                   at its end: without causal and documents
        kernel:    sdpa: torch's; flash2: ours in Triton, for a GPU. With sdpa on a GPU, with documents under
                   sdpa, and with those that lie in several places, the scores of a block are in memory
        Raises UserError for shapes that do not fit, for heads that cannot be divided, for a kernel that
        cannot run here, and for the way `state`.
        """
        self.layout.check_layers(softmax=True, linear=False)
        self._check(q, k, v, documents)
        if kernel not in (kernels := get_args(AttentionKernel)):
            raise UserError(f"unknown kernel {kernel!r}", where=WHERE, allowed=kernels)
        heads, (_, H, _, D) = self.layout.ranks("heads"), q.shape
        if documents is not None:
            documents = self._whole(documents)
        elif not causal:
            documents = self._real(q, tokens)
        if heads > 1:
            k, v = (_for_heads(x, H, heads) for x in (k, v))
            q, k, v = (_Swapped.apply(x, 1, 2, self._exchanges) for x in (q, k, v))
        scale = 1 / math.sqrt(D) if scale is None else scale  # as torch does, to the bit
        q = q if q.stride(-1) == 1 else q.contiguous()  # torch's kernel of a CPU does not look at it
        in_a_row = numbered(documents) if kernel == "flash2" and documents is not None else None
        documents = documents if in_a_row is None else in_a_row
        what = What(self._exchanges, causal, scale, documents, in_a_row is not None, kernel)
        out = Blocks.apply(q, k, v, what)
        return self._left_out.attended(_Swapped.apply(out, 2, 1, self._exchanges) if heads > 1 else out)

    def linear_attention(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Causal linear attention of this rank's tokens to those of the whole sequence: [B, H, T, E], as q.

        q, k: [B, H, T, D]; v: [B, H, T, E]; of the tokens that `split` gives
        A token's output is its query times the sum of k^T v over all tokens up to it, exactly, with sums in
        fp32 at least: no feature map and no normalizer, which is one more column of v, all 1. What is
        exchanged has D x E values per sequence and head, for any number of tokens.
        Raises UserError for shapes that do not fit, and where no states travel.
        """
        where = "Context.linear_attention"
        self.layout.check_layers(softmax=False, linear=True)
        shapes = [tuple(x.shape) for x in (q, k, v)]
        if any(len(shape) != 4 for shape in shapes) or q.shape != k.shape or q.shape[:3] != v.shape[:3]:
            allowed = "q and k [B, H, T, D], v [B, H, T, E]"
            raise UserError(f"shapes {', '.join(map(str, shapes))}", where=where, allowed=allowed)
        return self._left_out.attended(linear_attention(q, k, v, self._states))

    def _check(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, documents: torch.Tensor | None
    ) -> None:
        shapes = [tuple(x.shape) for x in (q, k, v)]
        if (
            any(len(shape) != 4 for shape in shapes)
            or k.shape != v.shape
            or (q.shape[0], *q.shape[2:]) != (k.shape[0], *k.shape[2:])
            or q.shape[1] % max(k.shape[1], 1)
        ):
            allowed = "q [B, H, T, D], k and v [B, G, T, D] with H a multiple of G"
            raise UserError(f"shapes {', '.join(map(str, shapes))}", where=WHERE, allowed=allowed)
        self._check_tokens(q.shape[2], WHERE)
        if documents is not None and tuple(documents.shape) != (q.shape[0], q.shape[2]):
            what = f"documents {list(documents.shape)}"
            raise UserError(what, where=WHERE, allowed=f"[{q.shape[0]}, {q.shape[2]}]")

    def _check_tokens(self, tokens: int, where: str) -> None:
        if tokens * self._ranks % self.layout.multiple:
            allowed = f"multiples of {self.layout.multiple // self._ranks}, as split gives"
            raise UserError(f"{tokens} tokens on a rank", where=where, allowed=allowed)

    def _whole(self, documents: torch.Tensor) -> torch.Tensor:
        """Documents of the whole sequence, in its order."""
        if self._ranks == 1:
            return documents
        all_ = self._exchanges.gathered(documents.long(), CONTEXT_DOCUMENTS, NAME, everywhere=True)
        length = documents.shape[1] * self._ranks
        order = [at for place in range(self._ranks) for at in self.layout.positions(place, length)]
        whole = torch.empty_like(all_[0]).repeat(1, self._ranks)
        whole[:, order] = torch.cat([*all_], dim=1)
        return whole

    def _real(self, q: torch.Tensor, tokens: int | None) -> torch.Tensor | None:
        """As documents: 0 for tokens of the sequence, -1 for those added; None if there are none."""
        length = q.shape[2] * self._ranks
        if tokens is None or self._padded(tokens) != length:
            what = f"{length} tokens on all ranks, of {'an unknown number' if tokens is None else tokens}"
            allowed = "tokens: of the whole sequence, where no mask hides those added at its end"
            raise UserError(what, where=WHERE, allowed=allowed)
        if tokens == length:
            return None
        real = torch.arange(length, device=q.device) < tokens
        return (real.long() - 1).expand(q.shape[0], length)

    # ---- loss

    def mean(self, total: torch.Tensor, counted: torch.Tensor) -> torch.Tensor:
        """This rank's contribution to the mean of all tokens' losses, a scalar.

        total:   sum of the losses of this rank's tokens that count; in fp32, because it is multiplied in its
                 dtype, and gradients with it
        counted: bool, any shape: which of them do; it may be none of a rank's

        It is `total` divided by the number of tokens that count on all ranks that average their gradients
        (those along data, context's among them; of a replica, under a scheme with sync), and times the number
        of these ranks: its average over them is the mean, and so are gradients that `lowband.shard` averages.
        The first call raises UserError, on every rank along context, if these have split different tokens.
        """
        self._compare(total.device)
        count = counted.sum().to(total.device, torch.float64).view(1)
        level = self._level()
        if (ranks := self._all.axis.levels.size(level)) > 1:
            count = self._all.gathered(count, TOKENS_COUNT, 0, "loss", level).sum()
        return total * (ranks / count.clamp(min=1)).to(total.dtype).squeeze()

    def _level(self) -> str:
        if self._averaged is None and self._all.axis.has_replicas:
            what = "is not bound, so its means would be over the tokens of all replicas"
            raise UserError(what, where="a Context", allowed="context.bind(module) before lowband.shard")
        return self._averaged or WORLD

    @torch._disable_dynamo  # type: ignore[untyped-decorator]
    def _compare(self, device: torch.device) -> None:
        """In the first loss: whether ranks have taken their tokens from the same sequences (passes.alike)."""
        self._left_out.loss()
        if not self._is_compared:
            self._is_compared, given, self._given = True, self._given, None
            Alike(Along(self._axis), device).check_inputs(given)


class _Swapped(torch.autograd.Function):
    """Heads (dim 1) for tokens (dim 2) between the ranks of heads, or back."""

    @staticmethod
    @torch._disable_dynamo  # type: ignore[untyped-decorator]
    def forward(
        ctx: Any, x: torch.Tensor, split: int, join: int, exchanges: ContextExchanges, again: bool = False
    ) -> torch.Tensor:
        ctx.exchanges, ctx.dims = exchanges, (join, split)
        return exchanges.swapped(x, split, join, CONTEXT_HEADS_GRAD if again else CONTEXT_HEADS, NAME)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # type: ignore[override]
        return _Swapped.apply(grad, *ctx.dims, ctx.exchanges, True), None, None, None, None


def _for_heads(x: torch.Tensor, heads: int, ranks: int) -> torch.Tensor:
    """Keys or values, repeated where there are fewer heads of them than ranks. Raises UserError."""
    groups = x.shape[1]
    if heads % ranks or (groups % ranks and ranks % groups):
        what = f"{heads} heads with {groups} of keys cannot be divided over {ranks} ranks"
        allowed = "multiples of them, or heads of keys that divide them; gather or ring"
        raise UserError(what, where="context_attention heads", allowed=allowed)
    return x if groups % ranks == 0 else x.repeat_interleave(ranks // groups, dim=1)
