"""Attention between ranks along context: computed, kept and held, as torch counts them and in closed form."""

from functools import partial
from typing import Any

import pytest
import torch
from kept import kept_by_blocks, most_held
from torch.utils._python_dispatch import TorchDispatchMode

import lowband
from lowband.cost.context_load import attended, held_more, kept_more
from lowband.run.on_ranks import on_ranks
from lowband.spec.model import ModelSpec

MODEL = ModelSpec(name="even", layers=2, hidden=64, heads=4, vocab=96, seq_len=32, source="test")
HEADS, GROUPS, WIDTH, TOKENS = 8, 4, 16, 512
GROUPED = MODEL.model_copy(update={"hidden": HEADS * WIDTH, "heads": HEADS, "kv_heads": GROUPS})
BOTH = "node=heads,world=ring"


def _context(ranks: int, way: str, zigzag: bool) -> lowband.Context:
    return lowband.Context(lowband.Topology({"node": 2}, lowband.Axes(context=ranks)), way, zigzag)


def _kept(ranks: int, way: str, zigzag: bool) -> tuple[float, float]:
    context = _context(ranks, way, zigzag)
    return kept_by_blocks(MODEL, context, kept_more(MODEL, 1, context.layout, "bf16"))


@pytest.mark.parametrize(
    ("ranks", "way", "zigzag"),
    [(2, "ring", True), (2, "gather", False), (2, "heads", True), (4, BOTH, True)],
)
def test_what_is_kept_is_the_closed_form(ranks: int, way: str, zigzag: bool) -> None:
    for found, expected in on_ranks(ranks, _kept, ranks, way, zigzag):
        assert found == expected


def _computed(ranks: int, way: str, zigzag: bool) -> tuple[float, float]:
    """FLOPs of attention's forward that kernels run, masked pairs too, over those of all pairs of this rank's
    queries, and the closed form of the rank that has most."""
    context, count = _context(ranks, way, zigzag), 0

    class Counting(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            nonlocal count
            if func.overloadpacket is torch.ops.aten._scaled_dot_product_flash_attention_for_cpu:
                q, k = args[0], args[1]
                count += q.shape[1] * q.shape[2] * k.shape[2]
            return func(*args, **(kwargs or {}))

    q = torch.randn(1, HEADS, 32, WIDTH)
    with Counting():
        context.attention(q, q[:, :GROUPS], q[:, :GROUPS])
    return count / (HEADS * 32 * 32 * ranks), float(sum(attended(context.layout, masked_too=True)))


@pytest.mark.parametrize("zigzag", [True, False])
@pytest.mark.parametrize(
    ("ranks", "way"),
    [(2, "ring"), (2, "heads"), (4, "node=gather,world=ring"), pytest.param(4, BOTH, marks=pytest.mark.wide)],
)
def test_kernels_compute_the_closed_form(ranks: int, way: str, zigzag: bool) -> None:
    """What a box paces (run/pacing.py) is what is predicted of it."""
    found = on_ranks(ranks, _computed, ranks, way, zigzag)
    assert max(computed for computed, _ in found) == found[0][1]


def _held(ranks: int, way: str) -> tuple[float, float]:
    """Bytes per token in attention's backward at most, and the closed form."""
    context = _context(ranks, way, zigzag=True)
    q = torch.randn(1, HEADS, TOKENS, WIDTH, dtype=torch.bfloat16, requires_grad=True)
    k, v = (torch.randn_like(q[:, :GROUPS]).detach().requires_grad_() for _ in "kv")
    y = context.attention(q, k, v)
    grad = torch.randn_like(y)
    return most_held(partial(y.backward, grad)) / TOKENS, held_more(GROUPED, 1, context.layout, "bf16")


@pytest.mark.parametrize(
    ("ranks", "way"),
    [
        (2, "ring"),
        pytest.param(2, "gather", marks=pytest.mark.wide),
        (4, "node=gather,world=ring"),
        pytest.param(4, "ring", marks=pytest.mark.wide),
        pytest.param(4, "gather", marks=pytest.mark.wide),
    ],
)
def test_what_a_backward_holds_is_near_the_closed_form(ranks: int, way: str) -> None:
    """Of heads the kernel's own memory on a CPU is most; the fullest rank decides."""
    found = on_ranks(ranks, _held, ranks, way)
    assert max(peak for peak, _ in found) == pytest.approx(found[0][1], rel=0.15)
