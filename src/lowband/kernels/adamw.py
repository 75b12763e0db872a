"""AdamW (arXiv 1711.05101, algorithm 2) on flat shards in one pass, in this arithmetic, all of it fp32:

    g = fp32(gradient) factor            m = b1 m + (1 - b1) g            v = b2 v + (1 - b2) (g g)
    p = p (1 - lr wd) - (m (lr / (1 - b1^t))) / (sqrt(v) (1 / sqrt(1 - b2^t)) + eps)

Every product, sum, quotient and root is rounded once, to nearest; scalars are computed in fp64 and rounded.
So the bits of the reference below, in torch, are those of the Triton kernel (`adamw_triton`), which runs on a
GPU. torch's own AdamW rounds in another order, and differs by a few units in the last place.

A value with a 16-bit gradient and a 16-bit copy moves 2 + 12 bytes to the chip and 12 + 2 back. Apart, to
scale the gradient, widen it, step and cast the weights takes 28 + 8 + 6 + 6.
"""

import torch

from lowband.kernels.adamw_scalars import Scalars
from lowband.kernels.device import runs_triton


def adamw(
    master: torch.Tensor,
    grad: torch.Tensor,
    first: torch.Tensor,
    second: torch.Tensor,
    scalars: Scalars,
    factor: torch.Tensor | None = None,
    copy: torch.Tensor | None = None,
) -> None:
    """Update values and moments in place, and write the new values to `copy`.

    master, first, second: 1D, contiguous, fp32; grad: as long, fp32 or 16 bits; copy: as long, 16 bits
    factor: fp32 scalar on their device, by which gradients are multiplied; None: 1
    """
    if runs_triton(master.device):
        from lowband.kernels import adamw_triton

        adamw_triton.launch(master, grad, first, second, scalars, factor, copy)
    else:
        reference(master, grad, first, second, scalars, factor, copy)


def reference(
    master: torch.Tensor,
    grad: torch.Tensor,
    first: torch.Tensor,
    second: torch.Tensor,
    scalars: Scalars,
    factor: torch.Tensor | None = None,
    copy: torch.Tensor | None = None,
) -> None:
    """The same in torch, whose bits are the definition. No operation here does two of them.

    Roots are taken in fp64: torch's of fp32 on a CPU are not all rounded to nearest.
    """
    g = grad.float() if factor is None else grad.float() * factor
    first.mul_(scalars.keep_first).add_(g * scalars.new_first)
    second.mul_(scalars.keep_second).add_((g * g).mul_(scalars.new_second))
    below = second.double().sqrt().float().mul_(scalars.root).add_(scalars.eps)
    master.mul_(scalars.decay).sub_((first * scalars.step).div_(below))
    if copy is not None:
        copy.copy_(master)
