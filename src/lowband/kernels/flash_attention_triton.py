"""FlashAttention-2 on a GPU (arXiv 2307.08691): launches, and the kernels as they are compiled elsewhere."""

from collections.abc import Iterator
from itertools import product
from typing import Any

import torch
import triton

from lowband.kernels.device import on_its_device
from lowband.kernels.flash_attention_backward import flash_backward_keys, flash_backward_queries, flash_delta
from lowband.kernels.flash_attention_configs import (
    BACKWARD_KEYS,
    BACKWARD_QUERIES,
    FORWARD,
    Tiles,
    classes,
    width,
)
from lowband.kernels.flash_attention_forward import flash_forward
from lowband.kernels.variant import Variant

DELTA_ROWS = 64  # queries per program of the row sums
MASKS = ("causal", "full", "spans")


def forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    is_causal: bool,
    scale: float,
    of_queries: torch.Tensor | None = None,
    softcap: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output [B, N, Tq, D] and logsumexp [B, N, Tq] fp32 of q [B, N, Tq, D], k and v [B, G, Tk, D].

    of_queries: `Spans.of_queries`, or None; then without is_causal
    """
    B, N, Tq, _ = q.shape
    out = torch.empty_like(q)
    logsumexp = torch.empty(B, N, Tq, dtype=torch.float32, device=q.device)
    launch_forward(q, k, v, out, logsumexp, is_causal, scale, of_queries, softcap)
    return out, logsumexp


@on_its_device
def launch_forward(q, k, v, out, logsumexp, is_causal, scale, of_queries=None, softcap=None) -> None:
    B, N, Tq, D = q.shape
    flash_forward[lambda c: (triton.cdiv(Tq, c["ROWS"]), B * N)](
        q, k, v, out, logsumexp, of_queries, *_strides(q, k, v, out), _of_batch(of_queries), N,
        N // k.shape[1], Tq, k.shape[2], scale, softcap, **classes(Tq, k.shape[2]),
        **_constants(D, is_causal, of_queries, softcap),
    )  # fmt: skip


def backward(
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    logsumexp: torch.Tensor,
    dlogsumexp: torch.Tensor | None,
    is_causal: bool,
    scale: float,
    of_queries: torch.Tensor | None = None,
    of_keys: torch.Tensor | None = None,
    softcap: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of q, k and v, in their shapes, from the output's gradient dout [B, N, Tq, D].

    logsumexp: contiguous; dlogsumexp: its gradient, or None for zeros
    of_queries, of_keys: `Spans`, or None
    """
    dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    given = dout, q, k, v, out, logsumexp, dlogsumexp
    launch_backward(*given, dq, dk, dv, is_causal, scale, of_queries, of_keys, softcap)
    return dq, dk, dv


@on_its_device
def launch_backward(
    dout, q, k, v, out, logsumexp, dlogsumexp, dq, dk, dv, is_causal, scale,
    of_queries=None, of_keys=None, softcap=None,
) -> None:  # fmt: skip
    B, N, Tq, D = q.shape
    G, Tk = k.shape[1], k.shape[2]
    delta = torch.empty_like(logsumexp)
    flash_delta[(triton.cdiv(Tq, DELTA_ROWS), B * N)](
        out, dout, delta, *_strides(out, dout), N, Tq, HEAD=D, WIDTH=width(D), ROWS=DELTA_ROWS
    )
    if dlogsumexp is not None:  # of a query without keys it may be anything, such as logaddexp's NaN
        delta -= dlogsumexp.masked_fill(logsumexp == float("-inf"), 0)
    sizes = N, N // G, Tq, Tk, scale, softcap
    options = {**classes(Tq, Tk), **_constants(D, is_causal, of_queries, softcap)}
    flash_backward_keys[lambda c: (triton.cdiv(Tk, c["COLUMNS"]), B * G)](
        q, k, v, dout, logsumexp, delta, of_keys, dk, dv, *_strides(q, k, v, dout, dk, dv),
        _of_batch(of_keys), *sizes, **options,
    )  # fmt: skip
    flash_backward_queries[lambda c: (triton.cdiv(Tq, c["ROWS"]), B * N)](
        q, k, v, dout, logsumexp, delta, of_queries, dq, *_strides(q, k, v, dout, dq),
        _of_batch(of_queries), *sizes, **options,
    )  # fmt: skip


def _strides(*tensors: torch.Tensor) -> list[int]:
    """The strides of each tensor's batch, head and position dims."""
    return [stride for tensor in tensors for stride in tensor.stride()[:3]]


def _of_batch(ends: torch.Tensor | None) -> int:
    """The stride of a sequence's spans, 0 where they are of all sequences."""
    return 0 if ends is None or len(ends) == 1 else ends.stride(0)


def _constants(
    head: int, is_causal: bool, spans: torch.Tensor | None, softcap: float | None
) -> dict[str, object]:
    mask = "causal" if is_causal else "full" if spans is None else "spans"
    return {"HEAD": head, "WIDTH": width(head), "MASK": mask, "IS_CAPPED": softcap is not None}


def variants(device: str) -> Iterator[Variant]:
    """Every kernel at each width's first tile: with each mask, with a narrower head, and capped.

    device: cuda | hip
    """
    rows = dict.fromkeys(("logsumexp", "delta"), "*fp32")
    tensors = dict.fromkeys(("q", "k", "v", "out", "dout", "dq", "dk", "dv"), "*bf16")
    kernels: list[tuple[str, Any, Tiles]] = [
        ("forward", flash_forward, FORWARD),
        ("backward_keys", flash_backward_keys, BACKWARD_KEYS),
        ("backward_queries", flash_backward_queries, BACKWARD_QUERIES),
    ]
    yield Variant(
        "flash_attention.delta", "head 128", flash_delta, {**tensors, **rows},
        {"HEAD": 128, "WIDTH": 128, "ROWS": DELTA_ROWS}, {"num_warps": 4},
    )  # fmt: skip
    kinds = [
        *((head, mask, False) for head, mask in product(FORWARD[device], MASKS)),
        *((head, "causal", False) for head in (96, 192)),
        *((head, "spans", True) for head in (128, 256)),
    ]
    for head, mask, is_capped in kinds:
        spans = {"spans": "*i32"} if mask == "spans" else {}
        absent = {} if spans else {"spans": None, "spans_step": 0}
        absent |= {} if is_capped else {"softcap": None}
        for kernel, function, tiles in kernels:
            size, columns, warps, stages = tiles[device][width(head)][0]
            yield Variant(
                f"flash_attention.{kernel}",
                f"head {head} {mask}{' capped' * is_capped} {size}x{columns} warps {warps} stages {stages}",
                function, {**tensors, **rows, **spans},
                {"HEAD": head, "WIDTH": width(head), "MASK": mask, "IS_CAPPED": is_capped, "ROWS": size,
                 "COLUMNS": columns, **absent},
                {"num_warps": warps, "num_stages": stages}, floats=("scale", "softcap"),
            )  # fmt: skip
