"""Exact attention without the score matrix in memory: FlashAttention-2 (arXiv 2307.08691).

Per head, with queries q [Tq, D], keys k and values v [Tk, D] and a scale s:

    S = s q k^T      P = exp(S - L) with L = logsumexp of S's rows      out = P v

and for a gradient do of out, with delta = the row sums of do * out:

    dv = P^T do      dP = do v^T      dS = P * (dP - delta)      dq = s dS k      dk = s dS^T q

Keys may come in parts, each with its own output o_i and L_i: L = logaddexp of the L_i, o = sum of
o_i exp(L_i - L). A part's gradients follow from o, do and L of the whole by the formulas above. Or torch's
autograd goes through the sum: with a gradient dL of a part's L, dS = P * (dP - delta + dL).

With causal masking a query sees the keys up to its own position, with the last query and the last key aligned
(as in FlashAttention since 2.1): key j <= query i + Tk - Tq. Documents and sliding windows: spans.py. A query
that sees no key has an output of 0.

With a softcap c (Gemma 2, arXiv 2408.00118) S = c tanh(s q k^T / c), and dS is multiplied by 1 - (S / c)^2.

Shape letters: B batch, N query heads, G key heads (N a multiple: grouped queries), T sequence, D head size.
"""

import torch

from lowband.errors import UserError
from lowband.kernels.device import DTYPES, IS_INTERPRETED, runs_triton
from lowband.kernels.flash_attention_reference import inputs, reference, reference_gradients
from lowband.kernels.spans import Spans

__all__ = [
    "attention", "attention_with_logsumexp", "check_dtype", "check_heads", "gradients", "inputs", "reference",
    "reference_gradients", "require",
]  # fmt: skip
HEAD_SIZES = range(8, 257, 8)  # computed as the next of 32, 64, 128 and 256, with zeros beyond
MOST_HEADS = 65535  # in the whole batch: the limit of a CUDA grid's second dimension
MOST_STRIDE = 2**31 // 512  # of a position: within a tile, of up to 256 positions, offsets have 32 bits
WIDEST_FP32 = 64  # on a GPU: exact fp32 products are unrolled; wider tiles compile for minutes and spill


def require(device: torch.device) -> None:
    """Raises UserError where the kernels cannot run."""
    if not runs_triton(device):
        raise UserError(
            f"needs Triton and a CUDA or ROCm device, not {device.type}",
            where="attention flash2",
            allowed="attention: sdpa",
        )


def check_heads(heads: int, kv_heads: int, head_size: int) -> None:
    """Raises UserError for head counts or a head size that the kernels do not support."""
    if head_size not in HEAD_SIZES:
        raise UserError(
            f"head size {head_size} is not supported",
            where="attention flash2",
            allowed=f"multiples of {HEAD_SIZES.step} up to {HEAD_SIZES[-1]}",
        )
    if kv_heads < 1 or heads % kv_heads:
        raise UserError(
            f"{heads} query heads are not a multiple of {kv_heads} key heads", where="attention flash2"
        )


def check_dtype(dtype: torch.dtype, head_size: int, device: torch.device) -> None:
    """Raises UserError for fp32 on a GPU with a head size above WIDEST_FP32."""
    if dtype == torch.float32 and head_size > WIDEST_FP32 and device.type == "cuda":
        raise UserError(
            f"fp32 with head size {head_size} on a GPU", where="attention flash2",
            allowed=f"fp16 or bf16, a head size of at most {WIDEST_FP32}, attention: sdpa",
        )  # fmt: skip


def attention(
    q_BNTD: torch.Tensor,
    k_BGTD: torch.Tensor,
    v_BGTD: torch.Tensor,
    is_causal: bool = False,
    scale: float | None = None,
    spans: Spans | None = None,
    softcap: float | None = None,
) -> torch.Tensor:
    """Softmax attention, differentiable: [B, N, Tq, D] in the dtype of q (fp16, bf16 or fp32).

    scale:   default 1 / sqrt(D)
    spans:   which keys each query sees, on q's device; without is_causal, which they say themselves
    softcap: the size that no score reaches; default: none

    A tensor whose last dim is not contiguous, or whose positions are more than MOST_STRIDE values apart, is
    copied; other strides are free.
    Raises UserError for a head size, a grouping, a dtype or a device that the kernels do not support.
    """
    return attention_with_logsumexp(q_BNTD, k_BGTD, v_BGTD, is_causal, scale, spans, softcap)[0]


def attention_with_logsumexp(
    q_BNTD: torch.Tensor,
    k_BGTD: torch.Tensor,
    v_BGTD: torch.Tensor,
    is_causal: bool = False,
    scale: float | None = None,
    spans: Spans | None = None,
    softcap: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`attention`, and the logsumexp of each query's scores: fp32 [B, N, Tq], -inf for a query without keys.

    Both are differentiable, so that outputs of the same queries for parts of the keys can be merged. What it
    raises is `attention`'s.
    """
    scale = _checked(q_BNTD, k_BGTD, v_BGTD, is_causal, scale, spans, softcap)
    options = is_causal, scale, *(spans or (None, None)), softcap
    if _is_upcast(q_BNTD):
        q, k, v = (x.float() for x in (q_BNTD, k_BGTD, v_BGTD))
        out, logsumexp = _forward(q, k, v, *options)
        return out.to(q_BNTD.dtype), logsumexp
    return _forward(q_BNTD, k_BGTD, v_BGTD, *options)


def gradients(
    dout_BNTD: torch.Tensor,
    q_BNTD: torch.Tensor,
    k_BGTD: torch.Tensor,
    v_BGTD: torch.Tensor,
    out_BNTD: torch.Tensor,
    logsumexp_BNT: torch.Tensor,
    is_causal: bool = False,
    scale: float | None = None,
    spans: Spans | None = None,
    softcap: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of q, k and v, in their shapes and dtypes, where k and v may be a part of a query's keys.

    dout, out, logsumexp: of the merged output, fp32 the last; each may be a view of a larger tensor
    Those of q are to be summed over the parts. What it raises is `attention`'s.
    """
    scale = _checked(q_BNTD, k_BGTD, v_BGTD, is_causal, scale, spans, softcap)
    options = is_causal, scale, *(spans or (None, None)), softcap
    tensors = dout_BNTD, q_BNTD, k_BGTD, v_BGTD, out_BNTD
    _check_output(dout_BNTD, q_BNTD, out_BNTD, logsumexp_BNT)
    if _is_upcast(q_BNTD):
        found = _backward(*(x.float() for x in tensors), logsumexp_BNT, None, *options)
        dq, dk, dv = (x.to(q_BNTD.dtype) for x in found)
        return dq, dk, dv
    return _backward(*tensors, logsumexp_BNT, None, *options)


def _checked(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    is_causal: bool,
    scale: float | None,
    spans: Spans | None,
    softcap: float | None,
) -> float:
    """The scale. Raises UserError for what the kernels do not support."""
    require(q.device)
    _check_shapes(q, k, v)
    if q.dtype not in DTYPES or {(x.dtype, x.device) for x in (k, v)} != {(q.dtype, q.device)}:
        given = ", ".join(f"{x.dtype} on {x.device}" for x in (q, k, v))
        raise UserError(
            f"q, k, v of {given}", where="attention flash2", allowed="fp16, bf16 or fp32, one device"
        )
    D = q.shape[3]
    check_heads(q.shape[1], k.shape[1], D)
    check_dtype(q.dtype, D, q.device)
    scale = D**-0.5 if scale is None else scale
    if not scale > 0:  # the kernels take the largest score before scaling
        raise UserError(f"scale {scale} is not positive", where="attention flash2")
    if softcap is not None and not softcap > 0:
        raise UserError(f"softcap {softcap} is not positive", where="attention flash2")
    if spans is not None:
        _check_spans(spans, q, k, is_causal)
    return scale


def _is_upcast(q: torch.Tensor) -> bool:
    """Whether the kernels get fp32: the interpreter's bf16 arithmetic is wrong."""
    return IS_INTERPRETED and q.dtype == torch.bfloat16


def _check_shapes(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    """Raises UserError unless shapes match: the kernels index k and v by the sizes of q and each other."""
    shapes = [tuple(x.shape) for x in (q, k, v)]
    if (
        any(len(shape) != 4 for shape in shapes)
        or k.shape != v.shape
        or q.shape[0] != k.shape[0]
        or q.shape[3] != k.shape[3]
        or q.shape[0] * q.shape[1] > MOST_HEADS
    ):
        raise UserError(
            f"q, k, v of shapes {shapes}", where="attention flash2",
            allowed=f"[B, N, Tq, D] and twice [B, G, Tk, D], B x N at most {MOST_HEADS}",
        )  # fmt: skip


def _check_spans(spans: Spans, q: torch.Tensor, k: torch.Tensor, is_causal: bool) -> None:
    if is_causal:
        raise UserError(
            "is_causal beside spans", where="attention flash2", allowed="spans made with is_causal=True"
        )
    for name, ends, length in (
        ("queries", spans.of_queries, q.shape[2]),
        ("keys", spans.of_keys, k.shape[2]),
    ):
        of_each = [(batch, 2, length) for batch in {1, q.shape[0]}]
        if tuple(ends.shape) not in of_each or ends.dtype != torch.int32 or ends.device != q.device:
            raise UserError(
                f"spans of {name} {list(ends.shape)} {ends.dtype} on {ends.device}", where="attention flash2",
                allowed=f"[{q.shape[0]} or 1, 2, {length}] torch.int32 on {q.device}",
            )  # fmt: skip


def _check_output(dout: torch.Tensor, q: torch.Tensor, out: torch.Tensor, logsumexp: torch.Tensor) -> None:
    """Raises UserError unless these are of q: the kernels index them by its sizes."""
    given = [(tuple(x.shape), x.dtype, x.device) for x in (dout, out, logsumexp)]
    of_q = tuple(q.shape), q.dtype, q.device
    if given != [of_q, of_q, (tuple(q.shape[:3]), torch.float32, q.device)]:
        told = ", ".join(f"{list(shape)} {dtype} on {device}" for shape, dtype, device in given)
        raise UserError(
            f"dout, out, logsumexp of {told}", where="attention flash2",
            allowed=f"twice {list(q.shape)} {q.dtype}, and {list(q.shape[:3])} torch.float32, on {q.device}",
        )  # fmt: skip


# Registered as torch operators, so that torch.compile does not break the graph at them.


@torch.library.custom_op("lowband::flash_attention", mutates_args=())
def _forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, is_causal: bool, scale: float,
    of_queries: torch.Tensor | None = None, of_keys: torch.Tensor | None = None, softcap: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    from lowband.kernels import flash_attention_triton

    q, k, v = (_with_contiguous_heads(x) for x in (q, k, v))
    return flash_attention_triton.forward(q, k, v, is_causal, scale, of_queries, softcap)


@_forward.register_fake
def _(q, k, v, *_options):
    q = _with_contiguous_heads(q)
    return torch.empty_like(q), q.new_empty(q.shape[:3], dtype=torch.float32)


@torch.library.custom_op("lowband::flash_attention_backward", mutates_args=())
def _backward(
    dout: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor,
    logsumexp: torch.Tensor, dlogsumexp: torch.Tensor | None, is_causal: bool, scale: float,
    of_queries: torch.Tensor | None = None, of_keys: torch.Tensor | None = None, softcap: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    from lowband.kernels import flash_attention_triton

    dout, q, k, v, out = (_with_contiguous_heads(x) for x in (dout, q, k, v, out))
    logsumexp = logsumexp.contiguous()
    return flash_attention_triton.backward(
        dout, q, k, v, out, logsumexp, dlogsumexp, is_causal, scale, of_queries, of_keys, softcap
    )


@_backward.register_fake
def _(_dout, q, k, v, *_others):
    return tuple(torch.empty_like(_with_contiguous_heads(x)) for x in (q, k, v))


def _keep(ctx, inputs, output) -> None:
    q, k, v, ctx.is_causal, ctx.scale, of_queries, of_keys, ctx.softcap = inputs
    ctx.save_for_backward(q, k, v, *output, of_queries, of_keys)
    ctx.set_materialize_grads(False)  # where only the output is used, the logsumexp's gradient costs nothing


def _gradients(ctx, dout, dlogsumexp):
    q, k, v, out, logsumexp, *spans = ctx.saved_tensors
    dout = torch.zeros_like(out) if dout is None else dout
    options = ctx.is_causal, ctx.scale, *spans, ctx.softcap
    return *_backward(dout, q, k, v, out, logsumexp, dlogsumexp, *options), None, None, None, None, None


_forward.register_autograd(_gradients, setup_context=_keep)


def _with_contiguous_heads(x: torch.Tensor) -> torch.Tensor:
    """x with a contiguous last dim, and positions near enough for the kernels, copied only if needed."""
    return x if x.stride(-1) == 1 and x.stride(-2) <= MOST_STRIDE else x.contiguous()
