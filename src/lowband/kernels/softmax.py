"""Softmax of the rows of a matrix, by four algorithms that move different numbers of bytes.

If no cache holds the row, every pass reads it from memory, and some write it. N values take

    recompute   max; sum of e^(x - max); output e^(x - max) / sum      reads 3 N, writes N
    reload      max; e^(x - max) written and summed; division          reads 3 N, writes 2 N
    online      max and sum together (arXiv 1805.02867); output        reads 2 N, writes N
    two_pass    sum as a mantissa and an exponent; output              reads 2 N, writes N

Two-Pass (arXiv 2001.04438) needs no maximum, because nothing in it can overflow: e^x = m 2^n with
n = round(x log2 e) and m = e^(x - n ln 2) in [2^-1/2, 2^1/2]. A sum of two pairs keeps the larger n and
scales the other mantissa by a power of two, which is exact. Rows with numbers beyond 45,000, whose n is not
exact in fp32, are computed by `recompute` instead.
"""

import torch
from torch.autograd.function import once_differentiable

from lowband.cost.softmax import GPU_ALGORITHMS
from lowband.errors import UserError
from lowband.kernels.device import DTYPES, runs_triton


def inputs(
    rows: int, columns: int, dtype: torch.dtype, device: torch.device, seed: int = 0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Random x and a random gradient of its softmax, each [rows, columns]."""
    generator = torch.Generator(device).manual_seed(seed)
    x, dy = (torch.randn(rows, columns, generator=generator, device=device) for _ in range(2))
    return (4 * x).to(dtype), dy.to(dtype)


def reference(x: torch.Tensor) -> torch.Tensor:
    """e^(x - max) / sum along the last dim, in x's dtype."""
    weights = (x - x.amax(-1, keepdim=True)).exp()
    return weights / weights.sum(-1, keepdim=True)


def softmax(x: torch.Tensor, algorithm: str = "two_pass") -> torch.Tensor:
    """Softmax along the last dim of [..., columns], differentiable, in x's dtype (fp16, bf16, fp32).

    Sums are fp32. A row with an infinity or a NaN gives the same result as torch.softmax.
    Raises UserError without a GPU, for an empty tensor, another dtype, and an unknown algorithm.
    """
    if algorithm not in GPU_ALGORITHMS:
        raise UserError(f"unknown algorithm '{algorithm}'", where="softmax", allowed=GPU_ALGORITHMS)
    if x.numel() == 0 or x.ndim == 0:
        raise UserError(f"shape {tuple(x.shape)}", where="softmax", allowed="[..., columns], not empty")
    if x.dtype not in DTYPES:
        raise UserError(f"{x.dtype}", where="softmax", allowed="fp16, bf16, fp32")
    if not runs_triton(x.device):
        raise UserError(f"needs Triton and a CUDA or ROCm device, not {x.device.type}", where="softmax")
    return _Softmax.apply(x, algorithm)


class _Softmax(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, algorithm):
        from lowband.kernels import softmax_triton

        rows = x.contiguous().view(-1, x.shape[-1])
        y = softmax_triton.forward(rows, algorithm).view(x.shape)
        ctx.save_for_backward(y)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        from lowband.kernels import softmax_triton

        (y,) = ctx.saved_tensors
        columns = y.shape[-1]
        dx = softmax_triton.backward(y.view(-1, columns), dy.contiguous().view(-1, columns))
        return dx.view(y.shape), None
