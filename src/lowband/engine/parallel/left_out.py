"""What a program that divides tokens over ranks along context may have left out.

A module that keeps its own attention, a loop that keeps its own mean or whole sequences: all of these train,
wrongly, and nothing fails. So until the first `Context.mean` that trains it is looked for, and warned of,
because there are programs that are right without it. Sequences that are not split later are known by their
lengths alone.
"""

import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from lowband.engine.transport.topology import Topology

# What walks over tokens in order, or over neighbours, and so needs all of them.
IN_ORDER = (nn.modules.conv._ConvNd, nn.RNNBase, nn.MultiheadAttention)


class LeftOut:
    """Of one `Context`."""

    def __init__(self, is_known: bool, has_all: bool) -> None:
        """is_known: nothing is looked for; has_all: whether each rank has all layers, and the loss"""
        self._is_known, self._has_all = is_known, has_all
        self._is_mean = is_known  # whether losses that train are means over all ranks' tokens
        self._has_split = self._has_attended = False
        self._lengths: set[int] | None = None if is_known else set()  # that came of dividing; None: said

    def split(self, tokens: int) -> None:
        """Tokens are divided, so many to each rank."""
        self._has_split = True
        if self._lengths is not None:
            self._lengths.add(tokens)

    def attended(self, out: torch.Tensor) -> torch.Tensor:
        """The same output of attention, [B, H, tokens, D], until it is known with word of its gradient."""
        self._has_attended = True
        self.compare_length("attention", out.shape[2])
        return out if self._is_mean else _Attended.apply(out, self)  # type: ignore[no-any-return]

    @torch._disable_dynamo  # type: ignore[untyped-decorator]
    def compare_length(self, what: str, tokens: int) -> None:
        """Prompts between steps, say, may be given whole, of which each rank would take all for its part."""
        if self._lengths and tokens not in self._lengths:
            self._lengths = None
            _warn(f"{what} of {tokens} tokens on a rank, as no split gave: right of parts of a sequence")

    def loss(self) -> None:
        """A loss is a mean over all ranks' tokens."""
        self._is_mean |= torch.is_grad_enabled()
        if self._is_known:
            return
        self._is_known = True
        if not self._has_attended and self._has_all:
            _warn("none of its attention was called: each rank's tokens see no others")
        if not self._has_split:
            _warn("no tokens were split: ranks along context compute the same ones")

    def gradient(self) -> None:
        """A gradient comes to attention."""
        if not self._is_mean and self._has_all:
            self._is_known = self._is_mean = True
            _warn("a loss that is no Context.mean is right only if it divides by the tokens of all ranks")


class _Attended(torch.autograd.Function):
    @staticmethod
    @torch._disable_dynamo  # type: ignore[untyped-decorator]
    def forward(ctx: Any, out: torch.Tensor, left_out: LeftOut) -> torch.Tensor:
        ctx.left_out = left_out
        return out.detach()  # a view from in here could not be changed in place

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # type: ignore[override]
        ctx.left_out.gradient()
        return grad, None


def in_order(module: nn.Module) -> Iterator[tuple[str, str]]:
    """Where a module needs more than one token at a time, and what does."""
    for name, child in module.named_modules():
        if isinstance(child, IN_ORDER):
            yield f"'{name}'", f"{type(child).__name__} needs the tokens of a whole sequence, in order"


def bound_context(module: nn.Module, topology: Topology) -> Any:
    """The Context that was bound to a module. Of one that is not, warns where `bind` would refuse."""
    context = getattr(module, "_lowband_context", None)
    if context is None and len(topology.along("context").ranks) > 1:
        for where, what in in_order(module):
            _warn(f"{where}: {what}, which ranks along context have parts of")
    return context


def _warn(what: str) -> None:
    warnings.warn(f"lowband.Context: {what}", UserWarning, stacklevel=3)
