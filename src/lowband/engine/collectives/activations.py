"""Exchanges of activations along an axis, inside of forward and backward (rows: spec.activations).

Every rank along the axis makes the same ones in the same order, because it computes the same layers. They
have lanes and an order of their own, so they never wait behind a unit's gather on the same links.
"""

from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch
from torch import nn

from lowband.engine.collectives.collectives import Collectives
from lowband.engine.options import Options
from lowband.engine.transport.axis import Axis
from lowband.engine.transport.call import Call
from lowband.engine.transport.lane import Work, outside_of_modes
from lowband.engine.transport.ledger import Ledger
from lowband.engine.transport.meter import MemoryMeter
from lowband.errors import UserError
from lowband.spec.activations import ALONG, LOSS_GATHER, Exchange
from lowband.spec.mesh import SELF, WORLD
from lowband.spec.step import Collective


class Along:
    """The exchanges of one module's activations with the ranks along an axis.

    ledger: where their bytes are counted; an engine of the module counts there too. Their buffers, as large
            as activations are, belong to autograd's memory and are not counted
    """

    def __init__(self, axis: Axis, cuts_tokens: bool = False) -> None:
        """cuts_tokens: sequence parallelism: whether some of the modules see this rank's tokens alone"""
        self.axis, self.ledger, self.cuts_tokens = axis, Ledger(), cuts_tokens
        self._of: dict[torch.device, Collectives] = {}

    def __reduce_ex__(self, _protocol: Any) -> NoReturn:
        """Reached by whoever copies a module that has it; parameters of the copy would be no slices."""
        what = f"a module that is cut over ranks along {self.axis.name} cannot be copied or pickled"
        allowed = "a copy made before it is cut; of lowband.shard: full_state_dict, Checkpointer"
        raise UserError(what, where=f"tensor ranks {list(self.axis.ranks)}", allowed=allowed)

    def count_in(self, ledger: Ledger) -> None:
        """Count what is sent from now on in another ledger."""
        self.ledger, self._of = ledger, {}

    @property
    def ranks(self) -> int:
        return len(self.axis.ranks)

    @property
    def place(self) -> int:
        """This rank's number along the axis."""
        return self.axis.place

    def pass_through(self, x: torch.Tensor, exchange: Exchange, name: str) -> torch.Tensor:
        """The tensor behind an exchange; its gradient goes the way back.

        name: of the module that asks for it, in messages
        """
        return x if self.ranks == 1 else _Passed.apply(x, self, exchange, name)  # type: ignore[no-any-return]

    def part(self, x: torch.Tensor, dim: int) -> torch.Tensor:
        """This rank's part of a tensor that every rank has."""
        return x.unflatten(dim, (self.ranks, -1)).select(dim if dim >= 0 else dim - 1, self.place)

    @outside_of_modes()
    def gathered(
        self, x: torch.Tensor, row: Collective, dim: int, name: str, outer: str = WORLD
    ) -> torch.Tensor:
        """The tensors of the ranks in a group of `outer`, all of one shape, joined along a dimension in their
        order.
        """
        x = x.movedim(dim, 0).contiguous()
        whole = x.new_empty(self.axis.levels.size(outer) * x.shape[0], *x.shape[1:])

        def work(collectives: Collectives, call: Call) -> Work:
            yield from collectives.gather(call, x.view(-1), whole.view(-1), SELF, outer, row.name)

        self._run(x, row, name, work, outer)
        return self._in_rank_order(whole, x.shape[0], outer).movedim(0, dim).contiguous()

    @outside_of_modes()
    def summed(self, x: torch.Tensor, row: Collective, name: str) -> torch.Tensor:
        """The sum of the ranks' tensors, all of one shape; the same bits on each of them."""
        missing = -x.numel() % self.ranks
        flat = nn.functional.pad(x.reshape(-1), (0, missing)) if missing else x.reshape(-1).clone()
        found = self._reduced(flat, row, name)
        return found[: x.numel()].view(x.shape)

    @outside_of_modes()
    def scattered(self, x: torch.Tensor, row: Collective, dim: int, name: str) -> torch.Tensor:
        """This rank's part, along a dimension, of the sum of the ranks' tensors."""
        x = x.movedim(dim, 0)
        part = x.shape[0] // self.ranks
        flat = self._by_place(x, part).reshape(-1).clone()
        return self._reduced(flat, row, name).view(part, *x.shape[1:]).movedim(0, dim).contiguous()

    def _reduced(self, flat: torch.Tensor, row: Collective, name: str) -> torch.Tensor:
        """flat: 1D, overwritten"""
        found: list[torch.Tensor] = []

        def work(collectives: Collectives, call: Call) -> Work:
            total = yield from collectives.reduce(call, call.hold(flat), row)
            call.release(total)
            found.append(total)

        self._run(flat, row, name, work)
        return found.pop()

    def _run(
        self,
        x: torch.Tensor,
        row: Collective,
        name: str,
        work: Callable[[Collectives, Call], Work],
        outer: str = WORLD,
    ) -> None:
        collectives = self._collectives(x.device)
        levels = (
            collectives.inwards(SELF, outer)
            if row.kind == "gather"
            else collectives.levels_of_reduction(row, x.dtype)
        )
        collectives.submit(name, levels, lambda call: work(collectives, call), [x]).wait()

    def _collectives(self, device: torch.device) -> Collectives:
        if device not in self._of:
            found = Collectives(ALONG, self.axis, self.ledger, MemoryMeter(), device, Options())
            self._of[device] = found
        return self._of[device]

    # Shards are numbered from the innermost level, which cuts first; ranks from the outermost.

    def _order(self, outer: str) -> Sequence[int]:
        """By rank in a group of the level, the place of its shard."""
        joined = self.axis.levels.joined(SELF, outer)
        return [0] if joined is None else joined.places

    def _in_rank_order(self, shards: torch.Tensor, length: int, outer: str) -> torch.Tensor:
        order = self._order(outer)
        if list(order) == sorted(order):
            return shards
        return shards.unflatten(0, (len(order), length))[list(order)].flatten(0, 1)

    def _by_place(self, parts: torch.Tensor, length: int) -> torch.Tensor:
        order = self._order(WORLD)
        if list(order) == sorted(order):
            return parts
        places = sorted(range(self.ranks), key=order.__getitem__)
        return parts.unflatten(0, (self.ranks, length))[places].flatten(0, 1)


FEWEST = 4  # tokens by which logits of all ranks are told to be the same


class _Passed(torch.autograd.Function):
    @staticmethod
    @torch._disable_dynamo  # type: ignore[untyped-decorator]
    def forward(ctx: Any, x: torch.Tensor, along: Along, exchange: Exchange, name: str) -> torch.Tensor:
        ctx.along, ctx.exchange, ctx.name = along, exchange, name
        row, dim = exchange.forward, exchange.dim
        if row is None:
            return along.part(x, dim).contiguous() if exchange.takes_part else x.view_as(x)
        if row.kind == "gather":
            return along.gathered(x, row, dim, name)
        if row.kind == "all_reduce":
            return along.summed(x, row, name)
        return along.scattered(x, row, dim, name)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:  # type: ignore[override]
        return _Passed.apply(grad, ctx.along, ctx.exchange.back, ctx.name), None, None, None


class _VocabularyLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        logits: torch.Tensor,
        targets: torch.Tensor,
        along: Along,
        ignore_index: int,
        name: str,
        looks: bool,
    ) -> torch.Tensor:
        ctx.dtype, width = logits.dtype, logits.shape[-1]
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))  # as torch computes it
        local = targets - along.place * width
        is_here = (local >= 0) & (local < width)
        place = local.masked_fill(~is_here, 0).unsqueeze(-1)
        largest = logits.max(dim=-1).values.clamp(min=torch.finfo(logits.dtype).min)  # if all are masked
        exponentials = (logits - largest.unsqueeze(-1)).exp()
        target = logits.gather(-1, place).squeeze(-1).masked_fill(~is_here, 0)
        mine = torch.stack([largest, exponentials.sum(dim=-1), target])
        all_ = along.gathered(mine.unsqueeze(0), LOSS_GATHER, 0, name)  # [ranks, 3, tokens]
        looks = looks and len(targets) >= FEWEST  # of fewer, other ones may have the same numbers by chance
        if looks and (all_[:, :2] == all_[0, :2]).all() and (all_[0, 1] != width).any():
            raise UserError(
                "every rank was given the same logits",
                where=f"Vocabulary of '{name}'",
                allowed="what a Vocabulary head returns, before its Join",
            )
        top = all_[:, 0].max(dim=0).values
        total = (all_[:, 1] * (all_[:, 0] - top).exp()).sum(dim=0)
        valid = targets != ignore_index
        losses = (total.log() + top - all_[:, 2].sum(dim=0)).masked_fill(~valid, 0)
        share = exponentials.mul_(((largest - top).exp() / total).unsqueeze(-1))
        ctx.save_for_backward(share, place, is_here, valid)
        return losses

    @staticmethod
    @torch.autograd.function.once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # type: ignore[override]
        share, place, is_here, valid = ctx.saved_tensors
        grads = share.clone()
        grads.scatter_add_(-1, place, -is_here.unsqueeze(-1).to(grads.dtype))
        grads = grads.mul_((grad * valid).unsqueeze(-1)).to(ctx.dtype)
        return grads, None, None, None, None, None


def vocabulary_losses(
    logits: torch.Tensor, targets: torch.Tensor, along: Along, ignore_index: int, name: str, looks: bool
) -> torch.Tensor:
    """Cross-entropy of each token, from this rank's part of the vocabulary.

    logits: [tokens, vocabulary / ranks]; targets: [tokens] int64, of the whole vocabulary
    looks:  whether to raise UserError, on every rank, if all of them have the same logits: those of all
    Returns [tokens] in fp32 or wider, 0 for targets of `ignore_index`; the same bits on every rank.
    Source: Megatron-LM (arXiv 1909.08053, section 3), with one message instead of three.
    """
    found: torch.Tensor = _VocabularyLoss.apply(logits, targets, along, ignore_index, name, looks)
    return found
