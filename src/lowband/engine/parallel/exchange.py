"""An exchange of tokens in two parts, between which something else is computed; in its backward as well.

Autograd asks for a gradient as soon as it reaches a function. So the backward of an end starts the way back,
hands on a gradient that nobody looks at, and the backward of the start waits for the real one.
"""

from collections.abc import Sequence
from typing import Any

import torch

from lowband.engine.collectives.experts import ExpertAxis
from lowband.engine.transport.axis import BoundHop
from lowband.engine.transport.lane import Handle
from lowband.spec.step import Collective


def started(x: torch.Tensor, exchange: "Exchange") -> torch.Tensor:
    """The rows that come, not to be looked at before `ended`."""
    return _Start.apply(x, exchange)  # type: ignore[no-any-return]


def ended(coming: torch.Tensor, exchange: "Exchange") -> torch.Tensor:
    """The rows that have come."""
    return _End.apply(coming, exchange)  # type: ignore[no-any-return]


class Exchange:
    """One hop's exchange from its start to its end, and the one of its gradient, which goes back."""

    def __init__(
        self,
        axis: ExpertAxis,
        bound: BoundHop,
        rows: tuple[Collective, Collective],
        to: Sequence[int],
        came: Sequence[int],
        name: str,
    ) -> None:
        self._of, self._name, self._to, self._came = (axis, bound, rows), name, to, came
        self._handle: Handle | None = None
        self.back: Exchange | None = None
        self.coming: torch.Tensor | None = None  # of a gradient

    def reversed(self) -> "Exchange":
        axis, bound, rows = self._of
        return Exchange(axis, bound, rows[::-1], self._came, self._to, self._name)

    def start(self, x: torch.Tensor) -> torch.Tensor:
        axis, bound, (row, _) = self._of
        coming, self._handle = axis.exchange(x, self._to, self._came, bound, row, self._name)
        return coming

    def end(self) -> None:
        assert self._handle is not None
        self._handle.wait()


class _Start(torch.autograd.Function):
    @staticmethod
    @torch._disable_dynamo  # type: ignore[untyped-decorator]
    def forward(ctx: Any, x: torch.Tensor, exchange: Exchange) -> torch.Tensor:
        ctx.exchange = exchange
        return exchange.start(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        back = ctx.exchange.back
        coming, back.coming = back.coming, None
        return _End.apply(coming, back), None


class _End(torch.autograd.Function):
    @staticmethod
    @torch._disable_dynamo  # type: ignore[untyped-decorator]
    def forward(ctx: Any, coming: torch.Tensor, exchange: Exchange) -> torch.Tensor:
        ctx.exchange = exchange
        exchange.end()
        return coming.view_as(coming)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        ctx.exchange.back = back = ctx.exchange.reversed()
        back.coming = _Start.apply(grad, back)
        # As many rows as autograd asks for, and no memory: the gradient's rows come from elsewhere.
        return grad.new_zeros(()).expand(grad.shape), None
