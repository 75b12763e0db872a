"""The device's practical limits, measured in the same run: copies and a large matrix product.

A copy of each size: a small one reaches a fraction of a large one's rate, and so does a small kernel.
"""

from collections.abc import Callable, Iterator

import torch

from lowband.bench.kernels.measure import KernelCase
from lowband.spec.kernel_rows import KernelRow

# fp32 values copied, 8 bytes moved for each; the matrices' dimension.
SIZES = {"cuda": ([2**i for i in range(28, 19, -1)], 8192), "cpu": ([2**20, 2**12], 128)}


def groups(device: torch.device) -> Iterator[list[KernelCase]]:
    copies, side = SIZES[device.type]
    for values in copies:
        yield [_copy(device, values)]
    row = KernelRow(
        part="ceilings", operation="matmul", implementation="torch matmul", dtype="bfloat16", rows=side,
        columns=side, flops=2 * side**3,
    )  # fmt: skip

    def factors() -> tuple[torch.Tensor, torch.Tensor]:
        generator = torch.Generator(device).manual_seed(0)
        a, b = (torch.randn(side, side, generator=generator, device=device).bfloat16() for _ in range(2))
        return a, b

    def matmul() -> Callable[[], torch.Tensor]:
        a, b = factors()
        return lambda: a @ b

    def error_of(out: torch.Tensor) -> float:
        a, b = factors()
        expected = a[:4].double() @ b.double()
        return float((out[:4].double() - expected).abs().max() / expected.abs().max())

    yield [KernelCase(row=row, make=matmul, error_of=error_of, tolerance=1e-2)]


def _copy(device: torch.device, values: int) -> KernelCase:
    row = KernelRow(
        part="ceilings", operation="copy", implementation="torch copy_", dtype="float32", rows=1,
        columns=values, bytes=8 * values, least_bytes=8 * values,
    )  # fmt: skip

    def make() -> Callable[[], torch.Tensor]:
        source = torch.randn(values, device=device)
        target = torch.empty_like(source)
        return lambda: target.copy_(source)

    return KernelCase(row=row, make=make, error_of=lambda out: float(out.isnan().sum()), tolerance=0)
