"""Linear cross-entropy, a piece of tokens at a time: the logits of all tokens are never in memory.

Of each piece logits are made, reduced to losses and turned into their gradient, from which this piece's
gradients of the head's input and weight follow, all in the forward. So nothing is computed twice, and from
forward to backward it keeps T H + V H values, where the whole keeps T V or more. The backward multiplies them
by the loss's gradient.

Losses and the weight's gradient are summed over pieces in fp32 (fp64 for fp64), in the order of the tokens:
results are those of the whole up to the order of these sums, and the same bits for as many pieces.

Source: Liger Kernel's fused linear cross-entropy (arXiv 2410.10989).
Shape letters: T tokens, P tokens of a piece, H hidden, V vocabulary.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch.autograd.function import once_differentiable

IGNORED = -100  # torch's, of targets that have no loss

OfLogits = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]


def of_logits(
    logits_PV: torch.Tensor, targets_P: torch.Tensor, count: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The sum of a piece's losses over `count`, a scalar, and its gradient [P, V] in the logits' dtype."""
    dtype = torch.promote_types(logits_PV.dtype, torch.float32)
    wide_PV, is_counted_P = logits_PV.to(dtype), targets_P != IGNORED
    of_target = targets_P.where(is_counted_P, 0).unsqueeze(1)
    total_P1 = wide_PV.logsumexp(1, keepdim=True)
    losses_P = (total_P1 - wide_PV.gather(1, of_target)).squeeze(1)
    grad_PV = (wide_PV - total_P1).exp_()
    del wide_PV  # not to be in memory beside the targets' places
    grad_PV -= (torch.arange(logits_PV.shape[1], device=logits_PV.device) == of_target).to(dtype)
    grad_PV *= (is_counted_P / count).to(dtype).unsqueeze(1)
    return losses_P.where(is_counted_P, 0).sum() / count, grad_PV.to(logits_PV.dtype)


def linear_cross_entropy(
    x_TH: torch.Tensor,
    weight_VH: torch.Tensor,
    targets_T: torch.Tensor,
    pieces: int,
    reduce: OfLogits = of_logits,
) -> torch.Tensor:
    """Mean cross-entropy of x weight^T over the targets that are not IGNORED, fp32 scalar (fp64 for fp64).

    reduce: `of_logits`, or what compiles it
    """
    return _InPieces.apply(x_TH, weight_VH, targets_T, pieces, reduce)  # type: ignore[no-any-return]


class _InPieces(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x_TH: torch.Tensor, weight_VH: torch.Tensor, targets_T: torch.Tensor, pieces: int,
        reduce: OfLogits,
    ) -> torch.Tensor:  # fmt: skip
        dtype = torch.promote_types(x_TH.dtype, torch.float32)
        trains = any(ctx.needs_input_grad)
        count = (targets_T != IGNORED).sum().to(dtype)
        loss = torch.zeros((), dtype=dtype, device=x_TH.device)
        if trains:
            of_x = torch.empty_like(x_TH)
            of_weight = torch.zeros_like(weight_VH, dtype=dtype)
        rows = max(1, -(-len(x_TH) // pieces))
        for start in range(0, max(1, len(x_TH)), rows):  # of no tokens the mean is NaN, as torch's
            piece = slice(start, start + rows)
            part, grad_PV = reduce(x_TH[piece] @ weight_VH.T, targets_T[piece], count)
            loss += part
            if trains:
                of_x[piece] = grad_PV @ weight_VH  # kept in x's dtype, whichever one autocast multiplies in
                of_weight += grad_PV.T @ x_TH[piece]
            del grad_PV  # before the next piece's logits
        if trains:
            ctx.save_for_backward(of_x, of_weight.to(weight_VH.dtype))
        return loss

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        of_x, of_weight = ctx.saved_tensors
        return of_x * grad.to(of_x.dtype), of_weight * grad.to(of_weight.dtype), None, None, None
