"""Linear attention: computed, moved, kept and held, as torch counts them and by cost/linear.py."""

from functools import partial
from typing import Any

import pytest
import torch
from kept import kept_by_blocks, most_held
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

import lowband
from lowband.cost.linear import KERNELS, held_bytes, kept_bytes, moved_bytes, products
from lowband.engine.parallel.linear import linear_attention, normalized
from lowband.run.on_ranks import on_ranks
from lowband.spec.model import ModelSpec

HEADS, WIDTH = 4, 32
MODEL = ModelSpec(
    name="linear", layers=2, hidden=HEADS * WIDTH, heads=HEADS, vocab=96, seq_len=1024, source="test",
    attention="linear",
)  # fmt: skip


def _flops(tokens: int) -> tuple[int, int]:
    """Of matrix products, forward and backward."""
    q, k, v = (torch.randn(1, HEADS, tokens, WIDTH, requires_grad=True) for _ in "qkv")
    with FlopCounterMode(display=False) as forward:
        y = normalized(q, k, v, linear_attention)
    with FlopCounterMode(display=False) as backward:
        y.sum().backward()
    return forward.get_total_flops(), backward.get_total_flops()


@pytest.mark.parametrize("tokens", [24, 64, 200, 512])
def test_products_are_the_closed_form(tokens: int) -> None:
    """Also where a chunk is filled up, and where all tokens are fewer than one."""
    [found] = on_ranks(1, _flops, tokens)
    expected = products(MODEL, 1, tokens)
    assert found == (expected.forward, expected.backward)
    assert expected.forward_hidden < expected.forward
    assert expected.backward_hidden < expected.backward


class _Moving(TorchDispatchMode):
    """Bytes that operators read and write, and how many of them do; views move nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = self.kernels = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        tensors = [x for x in torch.utils._pytree.tree_leaves(args) if isinstance(x, torch.Tensor)]
        is_view = any(out.untyped_storage().data_ptr() == x.untyped_storage().data_ptr() for x in tensors)
        if isinstance(out, torch.Tensor) and not (is_view and func.overloadpacket is not torch.ops.aten.add_):
            self.bytes += sum(x.numel() * x.element_size() for x in (*tensors, out))
            self.kernels += 1
        return out


def _moved(tokens: int) -> tuple[int, int]:
    q, k, v = (torch.randn(1, HEADS, tokens, WIDTH, dtype=torch.bfloat16) for _ in "qkv")
    with _Moving() as moving:
        normalized(q, k, v, linear_attention)
    return moving.bytes, moving.kernels


@pytest.mark.parametrize("tokens", [512, 1024])
def test_what_operators_move_is_near_the_closed_form(tokens: int) -> None:
    """bf16; without copies that a library's product makes of a transposed argument."""
    [(moved, kernels)] = on_ranks(1, _moved, tokens)
    assert moved == pytest.approx(moved_bytes(MODEL, 1, tokens), rel=0.1)
    assert pytest.approx(kernels, abs=5) == KERNELS - 11


def _kept(ranks: int) -> tuple[float, float]:
    along = lowband.Axes(context=ranks)
    context = lowband.Context(lowband.Topology({}, along), "state", False) if ranks > 1 else None
    return kept_by_blocks(MODEL, context, kept_bytes(MODEL, 1, MODEL.seq_len // ranks, "bf16"))


@pytest.mark.parametrize("ranks", [1, 4])
def test_what_is_kept_is_the_closed_form(ranks: int) -> None:
    for found, expected in on_ranks(ranks, _kept, ranks):
        assert found == expected


def _held(tokens: int) -> float:
    """Bytes per token in the backward at most."""
    q, k, v = (torch.randn(1, HEADS, tokens, WIDTH, dtype=torch.bfloat16, requires_grad=True) for _ in "qkv")
    y = linear_attention(q, k, nn.functional.pad(v, (0, 1), value=1.0))
    grad = torch.randn_like(y)
    return most_held(partial(y.backward, grad)) / tokens


@pytest.mark.parametrize("tokens", [512, 1024])
def test_what_a_backward_holds_is_near_the_closed_form(tokens: int) -> None:
    [found] = on_ranks(1, _held, tokens)
    assert found == pytest.approx(held_bytes(MODEL, 1, tokens, "bf16"), rel=0.15)
