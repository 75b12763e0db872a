"""Attention of some queries to some keys, with the logsumexp of each row, so that such blocks can be merged.

How blocks are merged, and that the gradients of a block follow from the merged output and logsumexp:
kernels.flash_attention, whose formulas these are.

Our kernel, also with documents in a row, and torch's flash operator for CPUs compute so. With a mask, and
with torch's on other devices, these are plain products: there a block's scores are in memory.
"""

from collections.abc import Callable
from functools import wraps
from typing import Any, NamedTuple

import torch

from lowband.kernels import flash_attention
from lowband.kernels.spans import Spans
from lowband.spec.model import AttentionKernel

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


class Seen(NamedTuple):
    """Which keys a query sees.

    triangle: query i sees the keys up to i; there are as many of both
    mask:     [B, queries, keys] bool, or None; only keys that it marks
    spans:    for our kernel alone, instead of both
    """

    triangle: bool
    mask: torch.Tensor | None = None
    spans: Spans | None = None


def wide(dtype: torch.dtype) -> torch.dtype:
    """In which sums over blocks are kept."""
    return torch.promote_types(dtype, torch.float32)


def in_own_dtypes(function: Callable[..., Any]) -> Callable[..., Any]:
    """Without autocast, which would round what is computed in fp32 and is so again in the backward."""

    @wraps(function)
    def outside(ctx: Any, x: torch.Tensor, *others: Any) -> Any:
        with torch.autocast(x.device.type, enabled=False):
            return function(ctx, x, *others)

    return outside


def forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, seen: Seen, scale: float, kernel: AttentionKernel
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output [B, H, Tq, D] in the dtype of q, logsumexp [B, H, Tq]; -inf, and 0, where a query sees no key.

    q: [B, H, Tq, D]; k, v: [B, G, Tk, D], where H is a multiple of G
    """
    if seen.mask is None and kernel == "flash2":
        return flash_attention.attention_with_logsumexp(q, k, v, seen.triangle, scale, seen.spans)
    if seen.mask is None and q.device.type == "cpu":
        o, lse = _flash(q, k, v, 0.0, seen.triangle, scale=scale)
        return o, lse
    o, lse = flash_attention.reference(*_wide(q, k, v), seen.triangle, scale, seen.mask)
    return o.to(q.dtype), lse


def backward(
    grad: torch.Tensor,
    qkv: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    merged: tuple[torch.Tensor, torch.Tensor],
    seen: Seen,
    scale: float,
    kernel: AttentionKernel,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """This block's part of the gradients of q, k and v.

    grad:   of the merged output
    merged: output and logsumexp of the queries over all blocks
    """
    if seen.mask is None and kernel == "flash2":
        return flash_attention.gradients(grad, *qkv, *merged, seen.triangle, scale, seen.spans)
    if seen.mask is None and grad.device.type == "cpu":
        found = _flash_backward(grad, *qkv, *merged, 0.0, seen.triangle, scale=scale)
        return found[0], found[1], found[2]
    tensors = _wide(grad, *qkv, *merged)
    return flash_attention.reference_gradients(*tensors, seen.triangle, scale, seen.mask)


def _wide(*tensors: torch.Tensor) -> list[torch.Tensor]:
    return [x.to(wide(x.dtype)) for x in tensors]
