"""Attention of some queries to some keys, with the logsumexp of each row, so that such blocks can be merged.

Of blocks (o_i, L_i) of the same queries: L = logaddexp of the L_i, o = sum of o_i exp(L_i - L). The gradients
of a block follow from the merged o and L: see kernels.flash_attention's formulas, whose delta is that of the
whole row.

torch's flash operator for CPUs computes so, and its backward takes o and L from outside. With a mask, and on
other devices, these are plain products: there a block's scores are in memory.
"""

from typing import NamedTuple

import torch

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


class Seen(NamedTuple):
    """Which keys a query sees.

    triangle: query i sees the keys up to i
    mask:     [B, queries, keys] bool, or None; only keys that it marks
    """

    triangle: bool
    mask: torch.Tensor | None = None


def wide(dtype: torch.dtype) -> torch.dtype:
    """In which sums over blocks are kept."""
    return torch.promote_types(dtype, torch.float32)


def forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, seen: Seen, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output [B, H, Tq, D] in the dtype of q, logsumexp [B, H, Tq]; -inf, and 0, where a query sees no key.

    q: [B, H, Tq, D]; k, v: [B, G, Tk, D], where H is a multiple of G
    """
    if seen.mask is None and q.device.type == "cpu":
        o, lse = _flash(q, k, v, 0.0, seen.triangle, scale=scale)
        return o, lse
    lse, weights = _weights(q, k, seen, scale, None)
    return (weights @ _repeated(v, q)).to(q.dtype), lse


def backward(
    grad: torch.Tensor,
    qkv: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    merged: tuple[torch.Tensor, torch.Tensor],
    seen: Seen,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """This block's part of the gradients of q, k and v.

    grad:   of the merged output
    merged: output and logsumexp of the queries over all blocks
    """
    (q, k, v), (out, lse) = qkv, merged
    if seen.mask is None and q.device.type == "cpu":
        found = _flash_backward(grad, q, k, v, out, lse, 0.0, seen.triangle, scale=scale)
        return found[0], found[1], found[2]
    _, weights = _weights(q, k, seen, scale, lse)
    grad, values = grad.to(weights.dtype), _repeated(v, q)
    delta = (grad * out).sum(-1, keepdim=True)
    scores = weights * (grad @ values.transpose(-1, -2) - delta) * scale
    dq = scores @ _repeated(k, q)
    dk, dv = scores.transpose(-1, -2) @ q.to(scores.dtype), weights.transpose(-1, -2) @ grad
    groups = k.shape[1], -1
    return dq, dk.unflatten(1, groups).sum(2), dv.unflatten(1, groups).sum(2)


def _weights(
    q: torch.Tensor, k: torch.Tensor, seen: Seen, scale: float, lse: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The logsumexp, its own if none is given, and the weights by it."""
    scores = scale * q.to(wide(q.dtype)) @ _repeated(k, q).transpose(-1, -2)
    if seen.triangle:
        scores.masked_fill_(scores.new_ones(scores.shape[-2:], dtype=torch.bool).triu(1), -torch.inf)
    if seen.mask is not None:
        scores.masked_fill_(~seen.mask.unsqueeze(1), -torch.inf)
    if lse is None:
        lse = scores.logsumexp(-1)
    sees_any = lse.isfinite().unsqueeze(-1)
    return lse, torch.where(sees_any, scores - lse.unsqueeze(-1), -torch.inf).exp()


def _repeated(x: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """Keys or values for each head of queries, in the wide dtype."""
    return x.to(wide(x.dtype)).repeat_interleave(q.shape[1] // x.shape[1], dim=1)
