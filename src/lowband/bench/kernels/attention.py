"""The sweep of FlashAttention-2's figures (arXiv 2307.08691, section 4.1): 16k tokens, hidden 2048, fp16.

Our kernel and torch's back ends: its build of FlashAttention-2, cuDNN, and the formulas in eager torch.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from lowband.bench.kernels.measure import KernelCase
from lowband.cost.attention import bytes_moved, flops
from lowband.kernels.flash_attention import attention, inputs, reference
from lowband.spec.kernel_rows import KernelRow

# Tokens, hidden size, sequence lengths, head sizes. 4096 and heads of 128 are first: they matter most if time
# runs out.
SIZES = {
    "cuda": (16384, 2048, (4096, 512, 1024, 2048, 8192, 16384), (128, 64)),
    "cpu": (64, 64, (32,), (32,)),
}
BACKENDS = {
    "torch flash": SDPBackend.FLASH_ATTENTION,
    "torch cudnn": SDPBackend.CUDNN_ATTENTION,
    "torch math": SDPBackend.MATH,
}
MATH_UP_TO = 2048  # beyond, its scores would fill the memory
TOLERANCE = 5e-3  # in fp16, relative to the largest value


def groups(device: torch.device) -> Iterator[list[KernelCase]]:
    tokens, hidden, lengths, heads = SIZES[device.type]
    for head in heads:
        for is_causal in (False, True):
            for length in lengths:
                shape = _Shape(device, tokens // length, hidden // head, length, head, is_causal)
                names = ["triton", *BACKENDS] if length <= MATH_UP_TO else ["triton", *list(BACKENDS)[:2]]
                for direction in ("forward", "backward"):
                    yield [shape.case(direction, name) for name in names]


class _Shape:
    """Batch, heads, length, head size and mask of one point."""

    def __init__(
        self, device: torch.device, batch: int, heads: int, length: int, head: int, is_causal: bool
    ) -> None:
        self.device, self.batch, self.heads, self.length, self.head = device, batch, heads, length, head
        self.is_causal = is_causal

    def case(self, direction: str, name: str) -> KernelCase:
        i = ("forward", "backward").index(direction)
        sizes = (self.batch, self.heads, self.length, self.length, self.head)
        moved = bytes_moved(self.batch, self.heads, self.heads, self.length, self.length, self.head, 2)[i]
        work = flops(*sizes, self.is_causal)[i]
        row = KernelRow(
            part="attention", operation=direction, implementation=name, dtype="float16", batch=self.batch,
            heads=self.heads, seq_len=self.length, head_dim=self.head, causal=self.is_causal,
            flops=work, paper_flops=work, least_bytes=moved,
        )  # fmt: skip
        make = self._forward if direction == "forward" else self._backward
        return KernelCase(
            row=row, make=lambda: make(name), error_of=self._error(direction), tolerance=TOLERANCE
        )

    def _inputs(self) -> tuple[torch.Tensor, ...]:
        shape = (self.batch, self.heads, self.heads, self.length, self.length, self.head)
        return inputs(shape, torch.float16, self.device)

    def _call(self, name: str) -> Callable[..., torch.Tensor]:
        if name == "triton":
            return lambda q, k, v: attention(q, k, v, self.is_causal)

        def torchs(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            with sdpa_kernel(BACKENDS[name]):
                return scaled_dot_product_attention(q, k, v, is_causal=self.is_causal)

        return torchs

    def _forward(self, name: str) -> Callable[[], Any]:
        q, k, v, _ = self._inputs()
        call = self._call(name)
        return lambda: call(q, k, v)

    def _backward(self, name: str) -> Callable[[], Any]:
        q, k, v, dout = self._inputs()
        leaves = [x.requires_grad_() for x in (q, k, v)]
        out = self._call(name)(*leaves)
        return lambda: torch.autograd.grad(out, leaves, dout, retain_graph=True)

    def _error(self, direction: str) -> Callable[[Any], float]:
        """Returns a function: the error of the last head of the last sequence against float64."""

        def error_of(result: Any) -> float:
            q, k, v, dout = (x[-1:, -1:].double() for x in self._inputs())
            leaves = [x.requires_grad_() for x in (q, k, v)]
            out, _ = reference(*leaves, self.is_causal, self.head**-0.5)
            if direction == "forward":
                return distance(result[-1:, -1:], out.detach())
            wanted = torch.autograd.grad(out, leaves, dout)
            return max(distance(a[-1:, -1:], b) for a, b in zip(result, wanted, strict=True))

        return error_of


def distance(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """The largest error, as a share of the largest value."""
    return float((found.double() - wanted).abs().max() / wanted.abs().max())
