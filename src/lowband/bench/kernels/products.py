"""Matrix products of transformer layers, by torch: how their rate depends on their shape.

The products of a linear layer with T tokens, `inputs` in and `outputs` out, named by their results:
  output:         x [T, inputs]  times  weight [outputs, inputs] transposed
  input_gradient: dy [T, outputs]  times  weight
  weight_gradient: dy transposed  times  x
Sizes are those of the layers of a given width, with and without tensor parallelism. In one more sweep a
single size grows in small steps: the rate falls whenever the result's tiles need one more wave
(arXiv 2401.14489).
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from lowband.bench.kernels.measure import KernelCase
from lowband.spec.kernel_rows import KernelRow

# Widths, tokens, tensor-parallel ranks; then tokens, inputs and the outputs of the sweep.
SIZES = {
    "cuda": (
        (1024, 2048, 4096, 6144, 8192, 12288), (1024, 4096, 16384), (1, 2, 4, 8),
        4096, 4096, range(1024, 8193, 128),
    ),
    "cpu": ((64,), (64,), (1, 2), 64, 64, range(32, 97, 32)),
}  # fmt: skip
HEADS = {"cuda": (50257, 50304), "cpu": (97,)}  # GPT-2's vocabulary, and padded to a multiple of 64
GRADIENTS_AT = {"cuda": 4096, "cpu": 64}  # width of the layers whose backward products are measured too
CHECKED_ROWS = 4
TOLERANCE = 1e-2  # in bf16, relative to the largest value


@dataclass(frozen=True)
class Linear:
    tokens: int
    inputs: int
    outputs: int


def groups(device: torch.device) -> Iterator[list[KernelCase]]:
    seen: set[tuple[Linear, str]] = set()
    for group in _sizes(device.type):
        new = [size for size in dict.fromkeys(group) if size not in seen]
        seen.update(new)
        if new:
            yield [_case(device, layer, result) for layer, result in new]


def _sizes(device_type: str) -> Iterator[list[tuple[Linear, str]]]:
    widths, tokens, tensor_parallel, some_tokens, inputs, sweep = SIZES[device_type]
    for width in widths:
        for count in tokens:
            for ranks in tensor_parallel:
                yield [(layer, "output") for layer in block_layers(count, width, ranks)]
    for count in tokens:
        for layer in block_layers(count, GRADIENTS_AT[device_type], 1):
            yield [(layer, result) for result in ("input_gradient", "weight_gradient")]
    for outputs in (*HEADS[device_type], *sweep):
        yield [(Linear(some_tokens, inputs, outputs), "output")]


def block_layers(tokens: int, width: int, ranks: int) -> tuple[Linear, ...]:
    """Linear layers of a GPT block on one of `ranks` tensor-parallel ranks (Megatron-LM's cuts)."""
    return (
        Linear(tokens, width, 3 * width // ranks),
        Linear(tokens, width // ranks, width),
        Linear(tokens, width, 4 * width // ranks),
        Linear(tokens, 4 * width // ranks, width),
    )


def _case(device: torch.device, layer: Linear, result: str) -> KernelCase:
    rows, inner, columns = {
        "output": (layer.tokens, layer.inputs, layer.outputs),
        "input_gradient": (layer.tokens, layer.outputs, layer.inputs),
        "weight_gradient": (layer.outputs, layer.tokens, layer.inputs),
    }[result]
    row = KernelRow(
        part="products", operation=result, implementation="torch matmul", dtype="bfloat16", rows=rows,
        columns=columns, inner=inner, flops=2 * rows * columns * inner,
        least_bytes=2 * (rows * inner + inner * columns + rows * columns),
    )  # fmt: skip

    def factors() -> tuple[torch.Tensor, torch.Tensor]:
        """Random factors [rows, inner] and [inner, columns], in the memory order of training."""
        generator = torch.Generator(device).manual_seed(0)

        def draw(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=generator, device=device, dtype=torch.bfloat16)

        if result == "output":
            return draw(rows, inner), draw(columns, inner).T
        if result == "input_gradient":
            return draw(rows, inner), draw(inner, columns)
        return draw(inner, rows).T, draw(inner, columns)

    def make() -> Callable[[], torch.Tensor]:
        a, b = factors()
        return lambda: a @ b

    def error_of(out: torch.Tensor) -> float:
        a, b = factors()
        expected = a[:CHECKED_ROWS].double() @ b.double()
        return float((out[:CHECKED_ROWS].double() - expected).abs().max() / expected.abs().max())

    return KernelCase(row=row, make=make, error_of=error_of, tolerance=TOLERANCE)
