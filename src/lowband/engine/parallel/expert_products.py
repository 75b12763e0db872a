"""The products of experts: each multiplies the rows that came to it.

`grouped_mm` of torch multiplies all of them at once; a loop over experts is the reference, and does what
torch's does not: fp64, and widths whose rows do not begin at multiples of 16 bytes. Both give the same bits
on a CPU. Experts without rows cost nothing, and their gradients are zeros.

Kept for the backward: rows, and what the activation is computed from; what it returned is computed again. Of
R rows of w bytes a value R (H + I) w bytes, R (H + 2 I) w with a gate. Plain autograd keeps another R I w,
2 R I w with a gate. Two arguments save what is kept around the products:

    places   of rows in fewer tokens: x is kept, which others keep too, and not its R copies: less R H w
    weights  multiply what is before the last product, so nobody keeps what is behind it: less R H w

Source: rows without copies, ScatterMoE (arXiv 2403.08245); the gradient of weights from what is before the
last product, SonicMoE (arXiv 2512.14080).

Shape letters: T tokens, R rows, H hidden, I inner width of an expert, E experts, N and O widths before and
behind a product.
"""

from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd.function import once_differentiable

from lowband.errors import UserError

Activation = Callable[[torch.Tensor], torch.Tensor]

_grouped_mm = getattr(F, "grouped_mm", None) or torch._grouped_mm  # the second: torch 2.9 and before
GROUPED = torch.bfloat16, torch.float16, torch.float32
ALIGNED = 16  # bytes
# Of an activation beside which numbers are drawn: another thread may draw them, as a loader does.
TRIES = 3


def products(
    x_RH: torch.Tensor,
    counts: torch.Tensor | Sequence[int],
    up: torch.Tensor,
    down: torch.Tensor,
    gate: torch.Tensor | None = None,
    activation: Activation = F.silu,
    places: torch.Tensor | None = None,
    weights: torch.Tensor | None = None,
) -> torch.Tensor:
    """[R, H]: down(activation(up(x))) of each row by its expert, down(activation(gate(x)) up(x)) with a gate.

    x_RH:     sorted by expert; with places [T, H]
    counts:   rows of each expert, [E] int64, or a list if they are known here
    up, gate: [E, I, H]; down: [E, H, I]: an expert's are as a linear layer's
    places:   [R] int64: row r is x[places[r]]
    weights:  [R], by which results are multiplied
    Raises UserError for an activation that changes its input or draws random numbers.
    """
    if torch.is_autocast_enabled(x_RH.device.type):  # as a linear layer does
        dtype = torch.get_autocast_dtype(x_RH.device.type)
        x_RH, up, down = x_RH.to(dtype), up.to(dtype), down.to(dtype)
        gate = None if gate is None else gate.to(dtype)
    x_RH = x_RH.contiguous()
    again = torch.is_grad_enabled()  # not known in the forward itself
    return _Products.apply(x_RH, up, down, gate, weights, places, counts, activation, again)  # type: ignore[no-any-return]


class _Products(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        up: torch.Tensor,
        down: torch.Tensor,
        gate: torch.Tensor | None,
        weights: torch.Tensor | None,
        places: torch.Tensor | None,
        counts: torch.Tensor | Sequence[int],
        activation: Activation,
        again: bool,
    ) -> torch.Tensor:
        rows = x if places is None else x[places]
        by = Grouped(counts, x.device) if runs_grouped(rows, up.shape[1:]) else Loop(counts)
        before = [by.rows(rows, each.mT) for each in (up, gate) if each is not None]
        ctx.save_for_backward(x, up, down, gate, weights, places, *before)
        ctx.by, ctx.activation = by, activation
        inner = (_inner_for_good if again else _inner)(before, activation, weights)
        return by.rows(inner, down.mT)

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        x, up, down, gate, weights, places, *before = ctx.saved_tensors
        by, grad = ctx.by, grad.contiguous()
        need_x, need_up, need_down, need_gate, need_weights, *_ = ctx.needs_input_grad
        of_inner = by.rows(grad, down)
        with torch.enable_grad():
            inputs = [each.detach().requires_grad_() for each in before]
            weights = None if weights is None else weights.detach().requires_grad_()
            inner = _inner(inputs, ctx.activation, weights)
        wanted = inputs if weights is None else [*inputs, weights]
        of_before = [each.contiguous() for each in torch.autograd.grad(inner, wanted, of_inner)]
        of_down = by.weights(grad, inner.detach()) if need_down else None
        del inner, of_inner
        rows = x if places is None else x[places]
        of_up = by.weights(of_before[0], rows) if need_up else None
        of_gate = by.weights(of_before[1], rows) if need_gate else None
        of_x = None
        if need_x:
            of_x = by.rows(of_before[0], up)
            if gate is not None:
                of_x += by.rows(of_before[1], gate)
            if places is not None:
                of_x = torch.zeros_like(x).index_add_(0, places, of_x)
        of_weights = of_before[-1] if need_weights else None
        return of_x, of_up, of_down, of_gate, of_weights, None, None, None, None


def _inner(
    before: Sequence[torch.Tensor], activation: Activation, weights: torch.Tensor | None
) -> torch.Tensor:
    """What the last product is of. before: results of up and, if there is one, of gate"""
    up, *gate = before
    inner = (activation(gate[0]) * up if gate else activation(up)).to(up.dtype)  # autocast widens some
    return inner if weights is None else (inner * weights.unsqueeze(1)).to(inner.dtype)


def _inner_for_good(
    before: Sequence[torch.Tensor], activation: Activation, weights: torch.Tensor | None
) -> torch.Tensor:
    """The same, where a backward may follow. Raises UserError if it could not compute it again."""
    if torch.compiler.is_compiling() or isinstance(before[0], FakeTensor):
        return _inner(before, activation, weights)
    versions = [each._version for each in before]
    for _ in range(TRIES):
        state = _random_state(before[0].device)
        inner = _inner(before, activation, weights)
        if versions != [each._version for each in before]:
            what, allowed = "changes its input", "inplace=False"
            break
        if torch.equal(state, _random_state(before[0].device)):
            return inner
        what, allowed = "draws random numbers", "dropout behind the experts"
    raise UserError(
        f"the activation {what}, and the backward computes it again", where="experts", allowed=allowed
    )


def _random_state(device: torch.device) -> torch.Tensor:
    return torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()


def runs_grouped(rows: torch.Tensor, widths: Sequence[int]) -> bool:
    """Whether torch multiplies such rows by matrices of these widths at once."""
    if rows.dtype not in GROUPED or isinstance(rows, FakeTensor) or not len(rows):
        return False
    return not any(width * rows.element_size() % ALIGNED for width in widths)


class Grouped:
    """Both products by torch's."""

    def __init__(self, counts: torch.Tensor | Sequence[int], device: torch.device) -> None:
        self._ends = torch.as_tensor(counts, device=device).cumsum(0, dtype=torch.int32)

    def rows(self, x_RN: torch.Tensor, w_ENO: torch.Tensor) -> torch.Tensor:
        """[R, O]: each row times its expert's matrix."""
        return _grouped_mm(x_RN, w_ENO, offs=self._ends)

    def weights(self, y_RO: torch.Tensor, x_RN: torch.Tensor) -> torch.Tensor:
        """[E, O, N]: the sums over each expert's rows of y^T x."""
        return _grouped_mm(y_RO.mT, x_RN, offs=self._ends)


class Loop:
    """The same, one expert after the other."""

    def __init__(self, counts: torch.Tensor | Sequence[int]) -> None:
        counts = counts.tolist() if isinstance(counts, torch.Tensor) else counts
        self._slices = [slice(*each) for each in pairwise(accumulate(counts, initial=0))]

    def rows(self, x_RN: torch.Tensor, w_ENO: torch.Tensor) -> torch.Tensor:
        y_RO = x_RN.new_empty(len(x_RN), w_ENO.shape[2])
        for own, w_NO in zip(self._slices, w_ENO, strict=True):
            torch.mm(x_RN[own], w_NO, out=y_RO[own])
        return y_RO

    def weights(self, y_RO: torch.Tensor, x_RN: torch.Tensor) -> torch.Tensor:
        sums_EON = x_RN.new_empty(len(self._slices), y_RO.shape[1], x_RN.shape[1])
        for own, sum_ON in zip(self._slices, sums_EON, strict=True):
            torch.mm(y_RO[own].mT, x_RN[own], out=sum_ON)
        return sums_EON
