"""Softmax of rows from 128 to a million columns: our four algorithms, torch's, and torch.compile's."""

from collections.abc import Callable, Iterator
from typing import Any

import torch

from lowband.bench.kernels.measure import KernelCase
from lowband.cost.softmax import BACKWARD_TRAFFIC, FP32_BYTES, GPU_ALGORITHMS, LEAST_TRAFFIC, traffic_bytes
from lowband.kernels.softmax import (
    inputs,
    reference,
    softmax,
)
from lowband.spec.kernel_rows import KernelRow

# Values in the whole matrix, and the lengths of its rows.
SIZES = {
    "cuda": (2**27, [2**i for i in (7, 9, 11, 13, 14, 15, 16, 17, 18, 20)]),
    "cpu": (2**12, [2**9]),
}
CHECKED_ROWS = 4
TOLERANCE = 1e-5  # in fp32, relative to the row's largest value


def groups(device: torch.device) -> Iterator[list[KernelCase]]:
    values, lengths = SIZES[device.type]
    for columns in lengths:
        rows = values // columns
        yield [
            *(_forward(device, rows, columns, algorithm, algorithm) for algorithm in GPU_ALGORITHMS),
            _forward(device, rows, columns, "torch", None),
            # On a CPU, torch's C++ compiler takes minutes.
            *([_forward(device, rows, columns, "torch.compile", None)] if device.type == "cuda" else []),
        ]
        yield [_backward(device, rows, columns, name) for name in ("triton", "torch")]


def _forward(device: torch.device, rows: int, columns: int, name: str, algorithm: Any) -> KernelCase:
    row = KernelRow(
        part="softmax", operation="forward", implementation=f"triton {name}" if algorithm else name,
        dtype="float32", rows=rows, columns=columns,
        bytes=traffic_bytes(algorithm, rows * columns) if algorithm else None,
        least_bytes=LEAST_TRAFFIC["forward"] * FP32_BYTES * rows * columns,
    )  # fmt: skip

    def make() -> Callable[[], torch.Tensor]:
        x, _ = inputs(rows, columns, torch.float32, device)
        if algorithm:
            return lambda: softmax(x, algorithm)
        if name == "torch":
            return lambda: torch.softmax(x, -1)
        torch.compiler.reset()  # else the second length is compiled for any length
        compiled = torch.compile(lambda x: torch.softmax(x, -1), dynamic=False)
        return lambda: compiled(x)

    def error_of(y: torch.Tensor) -> float:
        x, _ = inputs(rows, columns, torch.float32, device)
        expected = reference(x[-CHECKED_ROWS:].double())
        return float(((y[-CHECKED_ROWS:] - expected).abs() / expected.amax(-1, keepdim=True)).max())

    return KernelCase(row=row, make=make, error_of=error_of, tolerance=TOLERANCE)


def _backward(device: torch.device, rows: int, columns: int, name: str) -> KernelCase:
    matrix = FP32_BYTES * rows * columns
    row = KernelRow(
        part="softmax", operation="backward", implementation=name, dtype="float32", rows=rows,
        columns=columns, bytes=BACKWARD_TRAFFIC * matrix if name == "triton" else None,
        least_bytes=LEAST_TRAFFIC["backward"] * matrix,
    )  # fmt: skip

    def make() -> Callable[[], torch.Tensor]:
        x, dy = inputs(rows, columns, torch.float32, device)
        leaf = x.requires_grad_()
        y = softmax(leaf) if name == "triton" else torch.softmax(leaf, -1)
        return lambda: torch.autograd.grad(y, leaf, dy, retain_graph=True)[0]

    def error_of(dx: torch.Tensor) -> float:
        x, dy = (tensor[-CHECKED_ROWS:].double() for tensor in inputs(rows, columns, torch.float32, device))
        y = reference(x)
        expected = y * (dy - (y * dy).sum(-1, keepdim=True))
        largest = (y * dy).abs().amax(-1, keepdim=True)
        return float(((dx[-CHECKED_ROWS:] - expected).abs() / largest).max())

    return KernelCase(row=row, make=make, error_of=error_of, tolerance=TOLERANCE)
