"""Causal linear attention: a query meets the sum of what came before, a state, instead of every earlier key.

    out_t = q_t S_t      S_t = the sum of k_s^T v_s for s <= t      q, k [D], v [E], S [D, E]

Exact in chunks of C tokens: inside a chunk by products under a triangle, from earlier ones by the state
before the chunk, which is the sum of the chunks' own states. With g the gradient of out, N_t the sum of
q_s^T g_s for s >= t, the gradient of the state at t:

    dq_t = g_t S_t^T      dk_t = v_t N_t^T      dv_t = k_t N_t

The state before a rank's first token, and the gradient of the state behind its last one, are the sums of
other ranks' (collectives.states). Both travel while products inside of chunks are computed.

Source: Katharopoulos et al. (arXiv 2006.16236, section 3.3); in chunks, and over ranks: LASP-2 (arXiv
2502.07563, section 3).
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from lowband.engine.collectives.states import StateExchanges
from lowband.engine.parallel.attend import in_own_dtypes, wide
from lowband.spec.model import CHUNK

Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def reference(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """The sum over all earlier tokens and its own, with every product in memory: [B, H, T, E].

    q, k: [B, H, T, D]; v: [B, H, T, E]
    """
    return (q @ k.transpose(-1, -2)).tril() @ v


def linear_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, exchanges: StateExchanges | None = None
) -> torch.Tensor:
    """The same in chunks, of the dtype of q; sums over tokens are in fp32 at least.

    exchanges: with the ranks that have the tokens before and behind these; None: these are all
    """
    return _Linear.apply(q, k, v, exchanges)  # type: ignore[no-any-return]


def normalized(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, attend: Attend) -> torch.Tensor:
    """Linear attention whose weights are positive and sum to 1: [B, H, T, D], as v.

    Weights are f(q) f(k) with f = elu + 1 (equations 7 and 9 of Katharopoulos et al.). Their sum is one more
    column of v: the state is [D, D + 1].
    """
    q, k = F.elu(q) + 1, F.elu(k) + 1
    out = attend(q, k, F.pad(v, (0, 1), value=1.0))
    return out[..., :-1] / out[..., -1:]


class _Linear(torch.autograd.Function):
    @staticmethod
    @torch._disable_dynamo  # type: ignore[untyped-decorator]
    @in_own_dtypes
    def forward(
        ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, exchanges: StateExchanges | None
    ) -> torch.Tensor:
        q_, k_, v_ = (_chunks(x) for x in (q, k, v))
        sums = (k_.transpose(-1, -2) @ v_).cumsum(2)
        coming = None if exchanges is None else exchanges.sum_before(sums[:, :, -1])
        out = (q_ @ k_.transpose(-1, -2)).tril() @ v_
        before = torch.zeros_like(sums[:, :, 0]) if coming is None else coming.wait()
        out += q_ @ _shifted(sums, before)
        ctx.save_for_backward(q, k, v, before)
        ctx.exchanges = exchanges
        return _whole(out, q)

    @staticmethod
    @torch.autograd.function.once_differentiable  # type: ignore[untyped-decorator]
    @in_own_dtypes
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # type: ignore[override]
        q, k, v, before = ctx.saved_tensors
        exchanges: StateExchanges | None = ctx.exchanges
        q_, k_, v_, g = (_chunks(x) for x in (q, k, v, grad))
        sums = (q_.transpose(-1, -2) @ g).flip(2).cumsum(2)  # from the last chunk
        coming = None if exchanges is None else exchanges.sum_behind(sums[:, :, -1])
        weights, scores = (q_ @ k_.transpose(-1, -2)).tril(), (g @ v_.transpose(-1, -2)).tril()
        states = _shifted((k_.transpose(-1, -2) @ v_).cumsum(2), before)
        dq = scores @ k_ + g @ states.transpose(-1, -2)
        dk, dv = scores.transpose(-1, -2) @ q_, weights.transpose(-1, -2) @ g
        behind = torch.zeros_like(before) if coming is None else coming.wait()
        grads = _shifted(sums, behind).flip(2)
        dk += v_ @ grads.transpose(-1, -2)
        dv += k_ @ grads
        return _whole(dq, q), _whole(dk, k), _whole(dv, v), None


def _chunks(x: torch.Tensor) -> torch.Tensor:
    """[B, H, chunks, C, D] of [B, H, T, D]; behind the end there are zeros, which add nothing."""
    length = min(CHUNK, x.shape[2])
    missing = -x.shape[2] % length
    return F.pad(x.to(wide(x.dtype)), (0, 0, 0, missing)).unflatten(2, (-1, length))


def _whole(x: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """The tokens of chunks, without those behind the end."""
    return x.flatten(2, 3)[:, :, : like.shape[2]].to(like.dtype)


def _shifted(sums: torch.Tensor, first: torch.Tensor) -> torch.Tensor:
    """By chunk the sum of all before it: `first`, and the chunks' own. sums: with each chunk's own"""
    earlier = torch.cat([torch.zeros_like(sums[:, :, :1]), sums[:, :, :-1]], 2)
    return earlier + first.unsqueeze(2)
