"""AdamW on a GPU: each value, its moments, its gradient and its 16-bit copy are read and written once.

As in block_quant_triton, bits are the reference's: nothing is fused (enable_fp_fusion), and quotients and
roots round to nearest (`div_rn`, `sqrt_rn`), where Triton's own are approximate.
"""

from collections.abc import Iterator

import torch
import triton
import triton.language as tl

from lowband.kernels.adamw_scalars import Scalars
from lowband.kernels.device import on_its_device
from lowband.kernels.variant import Variant

TILE = 1024  # values of a program


@on_its_device
def launch(
    master: torch.Tensor,
    grad: torch.Tensor,
    first: torch.Tensor,
    second: torch.Tensor,
    scalars: Scalars,
    factor: torch.Tensor | None,
    copy: torch.Tensor | None,
) -> None:
    """As `adamw.adamw`."""
    n = len(master)
    if n == 0:
        return
    _step[(triton.cdiv(n, TILE),)](
        master, grad, first, second, factor, copy, n, *scalars, TILE=TILE, HAS_FACTOR=factor is not None,
        HAS_COPY=copy is not None, num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip


def variants(_device: str) -> Iterator[Variant]:
    """With gradients in both dtypes, clipped, with a 16-bit copy; and of fp32 without."""
    states = {"master": "*fp32", "first": "*fp32", "second": "*fp32"}
    for kind, has_both in (("bf16", True), ("fp32", True), ("fp32", False)):
        more = {"factor": "*fp32", "copy": "*bf16"} if has_both else {}
        none = {} if has_both else {"factor": None, "copy": None}
        yield Variant(
            "adamw.step", f"{kind} gradient{' clipped bf16 copy' if has_both else ''}", _step,
            {**states, "grad": f"*{kind}", **more},
            {"TILE": TILE, "HAS_FACTOR": has_both, "HAS_COPY": has_both, **none},
            {"num_warps": 4, "enable_fp_fusion": False}, floats=Scalars._fields, aligned=("n",),
        )  # fmt: skip


@triton.jit
def _step(
    master,  # pointer to [n] fp32, as of the moments
    grad,  # [n] floating point
    first,
    second,
    factor,  # one fp32 number
    copy,  # [n] floating point
    n,
    decay,
    keep_first,
    new_first,
    keep_second,
    new_second,
    step,
    root,
    eps,
    TILE: tl.constexpr,
    HAS_FACTOR: tl.constexpr,
    HAS_COPY: tl.constexpr,
):
    places = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    is_value = places < n
    g = tl.load(grad + places, mask=is_value, other=0.0).to(tl.float32)
    if HAS_FACTOR:
        g *= tl.load(factor)
    m = tl.load(first + places, mask=is_value, other=0.0) * keep_first + g * new_first
    v = tl.load(second + places, mask=is_value, other=0.0) * keep_second + (g * g) * new_second
    p = tl.load(master + places, mask=is_value, other=0.0) * decay
    p -= tl.div_rn(m * step, tl.sqrt_rn(v) * root + eps)
    tl.store(master + places, p, mask=is_value)
    tl.store(first + places, m, mask=is_value)
    tl.store(second + places, v, mask=is_value)
    if HAS_COPY:
        tl.store(copy + places, p.to(copy.dtype.element_ty), mask=is_value)
