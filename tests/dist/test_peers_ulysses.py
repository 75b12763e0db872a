"""DeepSpeed Ulysses as a peer on the same ranks: its `DistributedAttention` beside our way `heads`."""

from importlib import import_module

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import lowband
from lowband.cost.context import context_bytes
from lowband.run.count_calls import Outside
from lowband.run.on_ranks import on_ranks
from lowband.spec.activations import CONTEXT_HEADS, CONTEXT_HEADS_GRAD
from lowband.spec.machine import Machine
from lowband.spec.mesh import Levels
from lowband.spec.model import ModelSpec
from lowband.spec.run import RunSpec
from lowband.trainers import deepspeed
from tests.checkout import CONFIG

B, T, H, E = 2, 32, 8, 16  # sequences, tokens of a whole one, heads, width of a head
MODEL = ModelSpec(name="attention", layers=1, hidden=H * E, heads=H, vocab=256, seq_len=T, source="test")
FLAT = Machine.parse(
    {
        "name": "flat",
        "description": "one level, as of DeepSpeed's one exchange between all ranks",
        "device": {"name": "CPU", "source": "test"},
        "levels": [{"name": "world"}],
    },
    "test",
)
Found = tuple[list[torch.Tensor], int]  # output and gradients, [B, heads, its tokens, E]; bytes sent


class Local(nn.Module):
    """Attention of all tokens by some heads, [B, tokens, heads, E] as DeepSpeed hands them in."""

    def forward(self, *qkv: torch.Tensor) -> torch.Tensor:
        q, k, v = (x.transpose(1, 2) for x in qkv)
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2)


@pytest.fixture(autouse=True, scope="module")
def imported() -> None:
    """Once: each rank of each test would compute for seconds."""
    deepspeed.load("cpu")
    import_module("deepspeed.sequence.layer")


def _both(groups: int, dtype: torch.dtype) -> tuple[Found, Found, list[torch.Tensor]]:
    """Theirs, ours, and this rank's tokens of what one process finds."""
    import deepspeed as package
    from deepspeed.sequence.layer import DistributedAttention

    package.init_distributed("gloo", auto_mpi_discovery=False, verbose=False)
    topology = lowband.Topology({}, lowband.Axes(context=dist.get_world_size()))
    context = lowband.Context(topology, "heads")
    torch.manual_seed(0)
    *qkv, g = (torch.randn(B, size, T, E, dtype=torch.float64).to(dtype) for size in (H, groups, groups, H))
    whole = [x.clone().requires_grad_() for x in qkv]
    expected = F.scaled_dot_product_attention(*whole, is_causal=True, enable_gqa=True)
    expected.backward(g)
    outside = Levels(("world",), (dist.get_world_size(),))

    peer = DistributedAttention(Local(), dist.group.WORLD, scatter_idx=2, gather_idx=1)
    theirs = [context.split(x, 2).transpose(1, 2).contiguous().requires_grad_() for x in qkv]
    with Outside(outside, None) as sent:
        found = peer(*theirs, 0)
        found.backward(context.split(g, 2).transpose(1, 2).contiguous())
    their_tensors = [x.transpose(1, 2) for x in (found, *(each.grad for each in theirs))]
    of_theirs = their_tensors, sum(each.bytes for each in sent.sent)

    mine = [context.split(x, 2).requires_grad_() for x in qkv]
    with Outside(outside, topology.along("context").lanes(found.device)) as sent:
        found = context.attention(*mine)
        found.backward(context.split(g, 2))
    of_mine = [found, *(each.grad for each in mine)], sum(each.bytes for each in sent.sent)
    split = [context.split(x, 2) for x in (expected, *(each.grad for each in whole))]
    return of_theirs, of_mine, split


def _compared(groups: int, dtype: torch.dtype) -> tuple[list[bool], list[float], int, int]:
    """Whether outputs and gradients are theirs to the bit; ours from one process'; bytes of each."""
    (theirs, they_sent), (mine, we_sent), expected = _both(groups, dtype)
    same = [torch.equal(a, b) for a, b in zip(theirs, mine, strict=True)]
    off = [((a - b).abs().max() / b.abs().max()).item() for a, b in zip(mine, expected, strict=True)]
    return same, off, they_sent, we_sent


def _form(ranks: int, dtype: str, tokens: int = T) -> int:
    """Bytes that a rank sends for one layer, in closed form."""
    spec = RunSpec.model_construct(
        model=MODEL, scheme=CONFIG.scheme("ddp"), machine=FLAT, ranks=ranks, seq_len=tokens, micro_batch=B,
        accumulation=1, compute_dtype=dtype, recompute="none",
        **dict(lowband.Axes(context=ranks, context_attention="heads")),
    )  # fmt: skip
    rows = CONTEXT_HEADS.name, CONTEXT_HEADS_GRAD.name
    return sum(sent for (_, row, _), sent in context_bytes(spec).items() if row in rows)


@pytest.mark.parametrize("ranks", [2, 4])
def test_as_many_heads_of_keys(ranks: int) -> None:
    """The bits of both, in single precision and in half, and the bytes of the closed form."""
    for name, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16)):
        for same, _, they_sent, we_sent in on_ranks(ranks, _compared, H, dtype):
            assert same == [True] * 4
            assert they_sent == we_sent == _form(ranks, name)


@pytest.mark.parametrize("ranks", [2, 4])
def test_against_one_process(ranks: int) -> None:
    for same, off, *_ in on_ranks(ranks, _compared, H, torch.float64):
        assert same == [True] * 4
        assert off == [0.0] * 4


def test_a_ranks_volume_is_constant() -> None:
    """As ranks and tokens grow together (arXiv 2309.14509): with what it keeps, 1 / ranks."""
    x = B * T * H * E * 4
    for ranks in (2, 4, 8):  # of 8 heads
        assert _form(ranks, "fp32", T * ranks) * ranks == 8 * x * (ranks - 1)
