"""Recomputation of blocks: the same values, fewer bytes kept, both as the closed form has them."""

import pytest
import torch
import torch.distributed as dist
from kept import NORM_STATISTICS, kept_by
from named import SCHEMES, Topologies
from test_parity import QUANTIZED, SPEC, optimizer_of, stepped
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

import lowband
from lowband.cost.activations import kept_bytes_per_token
from lowband.model.gpt import GPT, Block
from lowband.run.on_ranks import on_ranks
from lowband.spec.model import ModelSpec
from tests.checkout import CONFIG

MODEL = ModelSpec(name="even", layers=3, hidden=64, heads=4, vocab=96, seq_len=32, source="test")
BATCH = 2
# Weights that stay, that are gathered over a level, and on one wire or on two.
KINDS = {"ddp", "hpz", "zeropp", "hier3"}


def inputs(tokens: int) -> torch.Tensor:
    return torch.randn(BATCH, tokens, MODEL.hidden, dtype=torch.bfloat16, requires_grad=True)


def kept(recompute: str) -> int:
    """Bytes of activations that a forward pass over the blocks keeps, parameters left out."""
    model = GPT(MODEL, recompute=recompute).bfloat16()  # type: ignore[arg-type]
    return kept_by(model, nn.Sequential(*model.blocks), inputs(MODEL.seq_len))


@pytest.mark.parametrize(("recompute", "statistics"), [("none", NORM_STATISTICS), ("full", 0)])
def test_activations_are_those_of_the_closed_form(recompute, statistics: int) -> None:
    per_token = kept_bytes_per_token(MODEL, MODEL.seq_len, recompute, "flash").block + statistics
    [found] = on_ranks(1, kept, recompute)
    assert found == per_token * BATCH * MODEL.seq_len * MODEL.layers


def kept_by_a_sharded_sequence() -> int:
    """Bytes that torch keeps of a norm and an MLP, tensor-parallel with its sequence divided."""
    ranks, h, f = dist.get_world_size(), MODEL.hidden, MODEL.mlp_width
    mesh = init_device_mesh("cpu", (ranks,))
    layer = nn.Sequential(nn.LayerNorm(h), nn.Linear(h, f), nn.GELU(), nn.Linear(f, h)).bfloat16()
    divided = Shard(1)
    plan = {
        "0": SequenceParallel(),
        "1": ColwiseParallel(input_layouts=divided),
        "3": RowwiseParallel(output_layouts=divided),
    }
    parallelize_module(layer, mesh, plan)
    return kept_by(layer, layer, inputs(MODEL.seq_len // ranks))


@pytest.mark.parametrize("ranks", [2, 4])
def test_torch_keeps_what_sequence_parallelism_gathers(ranks: int) -> None:
    """Of a token: the norm's input and the MLP's two widths divided by the ranks, and up's input whole."""
    h, f = MODEL.hidden, MODEL.mlp_width
    per_token = (2 * h + 2 * 2 * f + NORM_STATISTICS / 2) / ranks + 2 * h
    for found in on_ranks(ranks, kept_by_a_sharded_sequence):
        assert found == per_token * BATCH * MODEL.seq_len


def train(scheme: str, recompute: str, topology: lowband.Topology) -> list[float]:
    model = GPT(SPEC, seed=7, recompute=recompute)  # type: ignore[arg-type]
    lowband.shard(model, CONFIG.scheme(scheme), topology, Block, torch.float32)
    steps = stepped(model, optimizer_of(model.parameters()), 2)
    return [value for loss, norm in steps for value in (loss.item(), norm)]


def train_both(scheme: str) -> list[list[float]]:
    """Recomputed, and with everything kept."""
    topology = Topologies().of(scheme)
    return [train(scheme, recompute, topology) for recompute in ("full", "none")]


@pytest.mark.parametrize("ranks", [pytest.param(1, marks=pytest.mark.wide), 4])
@pytest.mark.parametrize(
    "scheme", [pytest.param(s, marks=[] if s in KINDS else [pytest.mark.wide]) for s in SCHEMES]
)
def test_values_are_the_same_with_and_without(scheme: str, ranks: int) -> None:
    """Where forward and backward gather on different wires, the blocks compute again with other weights."""
    for mine, theirs in on_ranks(ranks, train_both, scheme):
        assert mine == (pytest.approx(theirs, rel=1e-2) if scheme in QUANTIZED else theirs)
