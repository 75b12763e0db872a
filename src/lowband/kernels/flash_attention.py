"""Exact attention without the score matrix in memory: FlashAttention-2 (arXiv 2307.08691).

Per head, with queries q [Tq, D], keys k and values v [Tk, D] and a scale s:

    S = s q k^T      P = exp(S - L) with L = logsumexp of S's rows      out = P v

and for a gradient do of out, with delta = the row sums of do * out:

    dv = P^T do      dP = do v^T      dS = P * (dP - delta)      dq = s dS k      dk = s dS^T q

With causal masking a query sees the keys up to its own position, with the last query and the last key aligned
(as in FlashAttention since 2.1): key j <= query i + Tk - Tq. A query that sees no key has an output of 0.

Shape letters: B batch, N query heads, G key heads (N a multiple: grouped queries), T sequence, D head size.
"""

import torch

from lowband.errors import UserError
from lowband.kernels.device import IS_INTERPRETED, runs_triton

HEAD_SIZES = (32, 64, 128, 256)
MOST_HEADS = 65535  # in the whole batch: the limit of a CUDA grid's second dimension
WIDEST_FP32 = 64  # on a GPU: exact fp32 products are unrolled; wider tiles compile for minutes and spill


def inputs(
    shape: tuple[int, int, int, int, int, int], dtype: torch.dtype, device: torch.device, seed: int = 0
) -> tuple[torch.Tensor, ...]:
    """Random q, k, v and a random gradient of the output. shape: B, N, G, Tq, Tk, D."""
    B, N, G, Tq, Tk, D = shape
    generator = torch.Generator(device).manual_seed(seed)
    return tuple(
        torch.randn(size, generator=generator, dtype=torch.float32, device=device).to(dtype)
        for size in ((B, N, Tq, D), (B, G, Tk, D), (B, G, Tk, D), (B, N, Tq, D))
    )


def reference(
    q_BNTD: torch.Tensor, k_BGTD: torch.Tensor, v_BGTD: torch.Tensor, is_causal: bool, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output [B, N, Tq, D] and logsumexp [B, N, Tq] by the module's formulas, in the inputs' dtype."""
    N, Tq, Tk = q_BNTD.shape[1], q_BNTD.shape[2], k_BGTD.shape[2]
    k, v = (x.repeat_interleave(N // x.shape[1], dim=1) for x in (k_BGTD, v_BGTD))
    scores = scale * q_BNTD @ k.transpose(-1, -2)
    if is_causal:
        seen = torch.ones(Tq, Tk, dtype=torch.bool, device=q_BNTD.device).tril(Tk - Tq)
        scores = scores.masked_fill(~seen, float("-inf"))
    logsumexp = scores.logsumexp(-1)
    sees_any = logsumexp.isfinite().unsqueeze(-1)
    weights = torch.where(sees_any, scores - logsumexp.unsqueeze(-1), float("-inf")).exp()
    return weights @ v, logsumexp


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
            f"head size {head_size} is not supported", where="attention flash2", allowed=HEAD_SIZES
        )
    if heads % kv_heads:
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
) -> torch.Tensor:
    """Softmax attention, differentiable: [B, N, Tq, D] in the dtype of q (fp16, bf16 or fp32).

    scale: default 1 / sqrt(D). A last dim that is not contiguous is copied; other strides are free.
    Raises UserError for a head size, a grouping, a dtype or a device that the kernels do not support.
    """
    require(q_BNTD.device)
    _check_shapes(q_BNTD, k_BGTD, v_BGTD)
    D = q_BNTD.shape[3]
    check_heads(q_BNTD.shape[1], k_BGTD.shape[1], D)
    check_dtype(q_BNTD.dtype, D, q_BNTD.device)
    scale = D**-0.5 if scale is None else scale
    if not scale > 0:  # the kernels take the largest score before scaling
        raise UserError(f"scale {scale} is not positive", where="attention flash2")
    if IS_INTERPRETED and q_BNTD.dtype == torch.bfloat16:  # the interpreter's bf16 arithmetic is wrong
        q, k, v = (x.float() for x in (q_BNTD, k_BGTD, v_BGTD))
        return _forward(q, k, v, is_causal, scale)[0].to(torch.bfloat16)
    return _forward(q_BNTD, k_BGTD, v_BGTD, is_causal, scale)[0]


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


# Registered as torch operators, so that torch.compile does not break the graph at them.


@torch.library.custom_op("lowband::flash_attention", mutates_args=())
def _forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, is_causal: bool, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    from lowband.kernels import flash_attention_triton

    q, k, v = (_with_contiguous_heads(x) for x in (q, k, v))
    return flash_attention_triton.forward(q, k, v, is_causal, scale)


@_forward.register_fake
def _(q, k, v, is_causal, scale):
    q = _with_contiguous_heads(q)
    return torch.empty_like(q), q.new_empty(q.shape[:3], dtype=torch.float32)


@torch.library.custom_op("lowband::flash_attention_backward", mutates_args=())
def _backward(
    dout: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor,
    logsumexp: torch.Tensor, is_causal: bool, scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    from lowband.kernels import flash_attention_triton

    dout, q, k, v = (_with_contiguous_heads(x) for x in (dout, q, k, v))
    return flash_attention_triton.backward(dout, q, k, v, out, logsumexp, is_causal, scale)


@_backward.register_fake
def _(dout, q, k, v, out, logsumexp, is_causal, scale):
    return tuple(torch.empty_like(_with_contiguous_heads(x)) for x in (q, k, v))


def _keep(ctx, inputs, output) -> None:
    q, k, v, ctx.is_causal, ctx.scale = inputs
    ctx.save_for_backward(q, k, v, *output)
    ctx.set_materialize_grads(False)  # the logsumexp's gradient is not used


def _gradients(ctx, dout, _dlogsumexp):
    return *_backward(dout, *ctx.saved_tensors, ctx.is_causal, ctx.scale), None, None


_forward.register_autograd(_gradients, setup_context=_keep)


def _with_contiguous_heads(x: torch.Tensor) -> torch.Tensor:
    """x with a contiguous last dim, copied only if needed."""
    return x if x.stride(-1) == 1 else x.contiguous()
