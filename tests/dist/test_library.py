"""lowband.shard on any module: the usual loop, held against the same loop on one device."""

from functools import cache
from itertools import product

import pytest
import torch
from modules import HIER3, HPZ, INNER, STEPS, Adapted, HalfFrozen, Tower, inputs, is_layer, loop, sgd, sharded
from torch import nn
from torch.utils.checkpoint import checkpoint

import lowband
from lowband.run.on_ranks import on_ranks
from lowband.spec.scheme import Scheme
from tests.checkout import ROOT
from tests.pairwise import pairwise
from tests.refused import answer

DDP = Scheme(name="ddp", weights="self", grads="self", optim="self")


def single(make_model, make_optimizer, ranks: int):
    model = make_model()
    loop(model, make_optimizer, lambda step: [inputs(step, rank) for rank in range(ranks)])
    return {name: value.detach() for name, value in model.state_dict().items()}


def adamw(parameters):
    return torch.optim.AdamW(parameters, lr=1e-2)


def adagrad(parameters):
    return torch.optim.Adagrad(parameters, lr=1e-2)


def assert_same(got: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], unused: str = "") -> None:
    """Up to the order of sums over ranks; `unused` has no gradient on one device and a zero one here."""
    assert list(got) == list(expected)
    for name, value in expected.items():
        assert got[name].shape == value.shape
        if name != unused:
            assert torch.allclose(got[name], value, rtol=1e-5, atol=2e-5), name


def fused(parameters):
    """Fused kernels change parameters without raising their version counters."""
    return torch.optim.SGD(parameters, lr=1e-1, momentum=0.9, nesterov=True, fused=True)


OPTIMIZERS = {each.__name__: each for each in (adamw, sgd, adagrad, fused)}
SCHEMES = {scheme.name: scheme for scheme in (HIER3, HPZ, DDP)}


@cache
def tower(optimizer: str, ranks: int) -> dict[str, torch.Tensor]:
    return on_ranks(1, single, Tower, OPTIMIZERS[optimizer], ranks)[0]


@pytest.mark.parametrize(
    ("scheme", "optimizer", "ranks"), pairwise(product(SCHEMES, OPTIMIZERS, (4, 8)), size=1)
)
def test_plain_module_with_any_optimizer(scheme: str, optimizer: str, ranks: int) -> None:
    got = on_ranks(ranks, sharded, Tower, OPTIMIZERS[optimizer], SCHEMES[scheme], is_layer)[0]
    assert_same(got, tower(optimizer, ranks), "unused")


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("scheme", [HIER3, HPZ], ids=lambda s: s.name)
def test_activation_checkpointing(scheme: Scheme, reentrant: bool) -> None:
    [expected] = on_ranks(1, single, Tower, sgd, 4)
    got = on_ranks(4, sharded, lambda: Tower(True, reentrant), sgd, scheme, is_layer)[0]
    assert_same(got, expected, "unused")


class TiedPair(nn.Sequential):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self[0](x).tanh() @ self[1].weight


class Tied(nn.Module):
    """The head is the embedding; it is used inside a wrapped layer and outside of it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.into = nn.Linear(5, 9, bias=False)
        self.layers = nn.ModuleList([TiedPair(nn.Linear(9, 9), nn.Linear(5, 9, bias=False))])
        self.layers[0][1].weight = self.into.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers[0](self.into(x)).square().mean()


class TiedAndCheckpointed(Tied):
    """As above, with the layer checkpointed; after it (`head`) the weight is used once more, or before it."""

    def __init__(self, head: bool) -> None:
        super().__init__()
        self.head = head

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = checkpoint(
            self.layers[0], self.into(x) if not self.head else x.requires_grad_(), use_reentrant=True
        )
        return (self.into(y) if self.head else y).square().mean()


class TiedHead(TiedPair):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self[0](x @ self[1].weight.T).tanh() @ self[1].weight


@pytest.mark.parametrize(("scheme", "head"), pairwise(product(SCHEMES, [False, True]), size=1))
def test_tied_weight_under_reentrant_checkpointing(scheme: str, head: bool) -> None:
    """Its gradient comes in two pieces, of which either may be the first."""

    def make_model() -> nn.Module:
        model = TiedAndCheckpointed(head)
        if head:
            model.layers[0].__class__ = TiedHead
        return model

    [expected] = on_ranks(1, single, make_model, sgd, 4)
    assert_same(on_ranks(4, sharded, make_model, sgd, SCHEMES[scheme], is_layer)[0], expected)


@pytest.mark.parametrize(
    ("scheme", "make_model"), pairwise(product(SCHEMES, [Tied, HalfFrozen, Adapted]), size=1)
)
def test_tied_and_frozen_parameters(scheme: str, make_model) -> None:
    [expected] = on_ranks(1, single, make_model, sgd, 4)
    assert_same(on_ranks(4, sharded, make_model, sgd, SCHEMES[scheme], is_layer)[0], expected, "unused")


def levels_of_a_cluster():
    return lowband.Topology.from_cluster("local", ROOT).levels, lowband.Topology(INNER).levels


def test_a_topology_is_read_from_a_cluster_file() -> None:
    for found, expected in on_ranks(8, levels_of_a_cluster):
        assert found == expected


def huggingface() -> nn.Module:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(
        n_embd=24,
        n_layer=2,
        n_head=3,
        vocab_size=61,
        n_positions=16,
        resid_pdrop=0,
        embd_pdrop=0,
        attn_pdrop=0,
    )
    torch.manual_seed(5)
    return transformers.GPT2LMHeadModel(config)


def huggingface_losses(scheme: Scheme | None):
    """Losses of a GPT-2 built from a config (its head is tied), on one device or sharded."""
    model = huggingface()
    if scheme is not None:
        layers = type(model.transformer.h[0])
        model = lowband.shard(model, scheme, lowband.Topology(INNER), layers, compute_dtype=torch.float32)
    optimizer = adamw(model.parameters())
    losses = []
    for step in range(STEPS + 1):  # a loss shows the update before it
        tokens = torch.randint(0, 61, (2, 16), generator=torch.Generator().manual_seed(step))
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("scheme", [HIER3, HPZ], ids=lambda s: s.name)
def test_hugging_face_model(scheme: Scheme) -> None:
    _ = pytest.importorskip("transformers").GPT2LMHeadModel  # imported here, not in each rank: 2.5 s
    [expected] = on_ranks(1, huggingface_losses, None)
    assert on_ranks(4, huggingface_losses, scheme)[0] == pytest.approx(expected, rel=1e-5)


def bf16_inputs_and_outputs():
    model = lowband.shard(nn.Sequential(nn.Linear(5, 6)), HIER3, lowband.Topology(INNER), nn.Linear)
    out = model(torch.ones(2, 5))
    shards = [p.dtype for p in model.parameters()]
    return out.dtype, shards


def test_default_compute_dtype_is_bf16_with_fp32_shards() -> None:
    for out, shards in on_ranks(2, bf16_inputs_and_outputs):
        assert out == torch.bfloat16
        assert set(shards) == {torch.float32}


def mistakes():
    said = []
    for attempt in (
        lambda: lowband.shard(nn.Tanh(), HIER3, lowband.Topology(INNER), nn.Linear),
        lambda: lowband.shard(
            Tower(), HIER3.model_copy(update={"weights": "rack"}), lowband.Topology(INNER), is_layer
        ),
        lambda: lowband.shard(
            Tower(), HIER3.model_copy(update={"weights": "world"}), lowband.Topology(INNER), is_layer
        ),
        lambda: lowband.shard(
            lowband.shard(Tower(), HIER3, lowband.Topology(INNER), is_layer), HIER3, None, is_layer
        ),
        lambda: lowband.full_state_dict(nn.Linear(1, 1)),
        lambda: lowband.Topology({"package": 2, "node": 1}),
        lambda: lowband.Topology({"node": 0}),
    ):
        said.append(answer(attempt))
    return said


def test_mistakes_are_told() -> None:
    expected = (
        "no parameters",
        "no level 'rack' (allowed: self",
        "inner to outer",
        "already sharded",
        "not sharded",
        "'node' (1) is not a multiple of 'package' (2)",
        "inner levels {'node': 0}",
    )
    for said, words in zip(on_ranks(2, mistakes)[0], expected, strict=True):
        assert words in said


class Counting(Tower):
    """Its state has what is no tensor, and what is one."""

    def get_extra_state(self) -> object:
        return {"calls": 3}


class Scaled(nn.Linear):
    def get_extra_state(self) -> object:
        return torch.ones(2)


def extra_states() -> list[object]:
    model = Counting()
    model.first = Scaled(5, 7)
    state = lowband.full_state_dict(lowband.shard(model, DDP, lowband.Topology({}), is_layer))
    return [state["_extra_state"], state["first._extra_state"].tolist()] if state else []


def kept_state() -> bool:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    model = lowband.shard(model, DDP, lowband.Topology({}), nn.Linear, torch.float32)
    kept = lowband.full_state_dict(model)
    before = {name: value.clone() for name, value in kept.items()}
    model(torch.randn(8, 4))
    return all(torch.equal(value, before[name]) for name, value in kept.items())


def test_full_state_dict_copies_buffers() -> None:
    assert all(on_ranks(2, kept_state))


def test_full_state_dict_has_extra_state() -> None:
    assert on_ranks(2, extra_states) == [[{"calls": 3}, [1.0, 1.0]], []]
