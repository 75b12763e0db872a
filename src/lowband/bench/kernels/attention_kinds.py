"""Attention of the kinds that today's models train with, in bf16 and causal, beside torch's FlexAttention.

Grouped queries, a sliding window, documents in a row, a softcap, heads that are no power of two.
FlexAttention is the peer of the same kind: a Triton kernel that torch's compiler makes from a mask and a
function of scores. Torch's build of FlashAttention-2 and cuDNN stand beside it where they compute the kind.
"""

from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch.nn.attention import sdpa_kernel
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.nn.functional import scaled_dot_product_attention

from lowband.bench.kernels.attention import BACKENDS, distance
from lowband.bench.kernels.measure import KernelCase
from lowband.cost.attention import bytes_moved, flops_of_pairs
from lowband.kernels.flash_attention import attention, inputs, reference
from lowband.spec.kernel_rows import KernelRow

SIZES = {"cuda": (2, 16, 8192), "cpu": (1, 4, 32)}  # sequences, query heads, length
TOLERANCE = 2e-2  # in bf16, relative to the largest value
FLASH, CUDNN = list(BACKENDS)[:2]
OURS, FLEX = "triton", "torch.compile flex"


class Kind(NamedTuple):
    """head: its size; group: query heads to a key head; window: keys before its own that a query sees

    documents: how many are in a row, from short to long: 1, 3, 5, ... parts of the sequence
    """

    head: int = 128
    group: int = 1
    window: int | None = None
    documents: int = 1
    softcap: float | None = None

    @property
    def is_masked(self) -> bool:
        return self.window is not None or self.documents > 1

    def lengths(self, length: int) -> list[int]:
        ends = [length * i**2 // self.documents**2 for i in range(self.documents + 1)]
        return [end - start for start, end in pairwise(ends)]


KINDS = {
    "plain": Kind(),
    "4 queries a key": Kind(group=4),
    "window": Kind(window=1023),
    "8 documents": Kind(documents=8),
    "softcap 50": Kind(softcap=50.0),
    "heads of 96": Kind(head=96),
    "heads of 192": Kind(head=192),
}
ON_A_CPU = ("4 queries a key", "window", "8 documents")  # the interpreter takes seconds for each


def groups(device: torch.device) -> Iterator[list[KernelCase]]:
    for name in KINDS if device.type == "cuda" else ON_A_CPU:
        kind = KINDS[name]
        others = [] if kind.is_masked or kind.softcap else [FLASH, CUDNN]
        for direction in ("forward", "backward"):
            yield [
                _Point(device, name, kind, each).case(direction)
                for each in (OURS, FLEX, *(others if device.type == "cuda" else []))
            ]


class _Point:
    """A kind by one implementation."""

    def __init__(self, device: torch.device, name: str, kind: Kind, implementation: str) -> None:
        self.device, self.name, self.kind, self.implementation = device, name, kind, implementation
        self.batch, self.heads, self.length = SIZES[device.type]

    def case(self, direction: str) -> KernelCase:
        i, kind, element = ("forward", "backward").index(direction), self.kind, 2
        sizes = self.batch, self.heads, self.heads // kind.group, self.length, self.length, kind.head
        first, end = self._spans().of_queries[0].long()
        work = flops_of_pairs(self.batch * self.heads * int((end - first).sum()), kind.head)[i]
        row = KernelRow(
            part="attention_kinds", operation=f"{direction}, {self.name}", implementation=self.implementation,
            dtype="bfloat16", batch=self.batch, heads=self.heads, seq_len=self.length, head_dim=kind.head,
            causal=True, flops=work, paper_flops=work, least_bytes=bytes_moved(*sizes, element)[i],
        )  # fmt: skip
        return KernelCase(
            row=row, make=self._forward if i == 0 else self._backward, error_of=self._error(i),
            tolerance=TOLERANCE,
        )  # fmt: skip

    def _spans(self) -> Any:
        from lowband.kernels.spans import spans  # which an older tree beside this one lacks

        return spans([self.kind.lengths(self.length)], window=(self.kind.window, 0))

    def _inputs(self) -> tuple[torch.Tensor, ...]:
        shape = (
            self.batch,
            self.heads,
            self.heads // self.kind.group,
            self.length,
            self.length,
            self.kind.head,
        )
        return inputs(shape, torch.bfloat16, self.device)

    def _forward(self) -> Callable[[], Any]:
        q, k, v, _ = self._inputs()
        call = self._call()
        return lambda: call(q, k, v)

    def _backward(self) -> Callable[[], Any]:
        q, k, v, dout = self._inputs()
        leaves = [x.requires_grad_() for x in (q, k, v)]
        out = self._call()(*leaves)
        return lambda: torch.autograd.grad(out, leaves, dout, retain_graph=True)

    def _call(self) -> Callable[..., torch.Tensor]:
        kind, is_grouped = self.kind, self.kind.group > 1
        if self.implementation == OURS:
            seen = self._spans().to(self.device) if kind.is_masked else None
            return lambda q, k, v: attention(q, k, v, seen is None, spans=seen, softcap=kind.softcap)
        if self.implementation == FLEX:
            return self._flex()

        def torchs(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            with sdpa_kernel(BACKENDS[self.implementation]):
                return scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=is_grouped)

        return torchs

    def _flex(self) -> Callable[..., torch.Tensor]:
        """On a CPU as it is, with all scores in memory: there it only shows that the sums are right."""
        kind = self.kind
        lengths = torch.tensor(kind.lengths(self.length), device=self.device)
        document = torch.arange(len(lengths), device=self.device).repeat_interleave(lengths)

        def seen(_b: Any, _h: Any, query: Any, key: Any) -> Any:
            both = key <= query
            if kind.documents > 1:
                both = both & (document[query] == document[key])
            if kind.window is not None:
                both = both & (query - key <= kind.window)
            return both

        def capped(score: Any, *_: Any) -> Any:
            assert kind.softcap is not None
            return kind.softcap * torch.tanh(score / kind.softcap)

        is_gpu = self.device.type == "cuda"
        blocks = create_block_mask(seen, None, None, self.length, self.length, self.device, _compile=is_gpu)
        run: Callable[..., Any] = torch.compile(flex_attention, dynamic=False) if is_gpu else flex_attention
        options = {"block_mask": blocks, "enable_gqa": kind.group > 1}
        score = capped if kind.softcap else None
        return lambda q, k, v: run(q, k, v, score_mod=score, **options)

    def _error(self, i: int) -> Callable[[Any], float]:
        """Returns a function: the error of the last key head of the last sequence against float64."""

        def error_of(result: Any) -> float:
            q, k, v, dout = self._inputs()
            last = slice(-self.kind.group, None)
            tensors = q[-1:, last], k[-1:, -1:], v[-1:, -1:]
            leaves = [x.double().requires_grad_() for x in tensors]
            mask = self._spans().mask().to(self.device)
            out, _ = reference(*leaves, False, self.kind.head**-0.5, mask, self.kind.softcap)
            if i == 0:
                return distance(result[-1:, last], out.detach())
            wanted = torch.autograd.grad(out, leaves, dout[-1:, last].double())
            found = result[0][-1:, last], result[1][-1:, -1:], result[2][-1:, -1:]
            return max(distance(a, b) for a, b in zip(found, wanted, strict=True))

        return error_of
