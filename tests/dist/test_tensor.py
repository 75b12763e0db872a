"""Layers cut over tensor ranks, against one process that has them whole, in fp64."""

import copy
from collections.abc import Mapping
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import lowband
from lowband.engine.units.parts import along_tensor
from lowband.engine.units.slice_of import is_partial, slice_of
from lowband.errors import UserError
from lowband.model.gpt import GPT
from lowband.run.on_ranks import on_ranks
from lowband.spec.activations import SHARED_REDUCE
from lowband.spec.model import ModelSpec
from lowband.spec.tensor import (
    Column,
    Join,
    Partial,
    Plan,
    Row,
    Split,
    Tokens,
    Vocabulary,
    Whole,
    gpt_plan,
    rule_of,
)
from tests.refused import refusal

SMALL = ModelSpec(name="small", layers=2, hidden=32, heads=4, vocab=64, seq_len=16, source="none")
TIED = SMALL.model_copy(update={"tied_head": True, "positions": "rotary"})


class Llama(nn.Module):
    """Queries, keys and values are products of their own, with fewer heads of keys; queries have a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm = nn.Embedding(48, 32), nn.RMSNorm(32)
        self.q, self.k, self.v = (nn.Linear(32, width, bias=False) for width in (32, 16, 16))
        self.q_norm = nn.RMSNorm(4)  # of each head's queries
        self.out = nn.Linear(32, 32, bias=False)
        self.gate, self.up, self.down = nn.Linear(32, 48), nn.Linear(32, 48), nn.Linear(48, 32, bias=False)
        self.second_norm, self.last_norm, self.head = nn.RMSNorm(32), nn.RMSNorm(32), nn.Linear(32, 48)
        self.layer, self.logits, self.loss = nn.Identity(), nn.Identity(), nn.CrossEntropyLoss()

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor | None = None) -> torch.Tensor:
        x = self.layer(self.embed(tokens))
        normed = self.norm(x)
        q, k, v = (f(normed).unflatten(-1, (-1, 4)).transpose(1, 2) for f in (self.q, self.k, self.v))
        q = self.q_norm(q)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        normed = self.second_norm(x)
        x = x + self.down(F.silu(self.gate(normed)) * self.up(normed))
        logits = self.head(self.last_norm(x))
        return self.logits(logits) if targets is None else self.loss(logits.flatten(0, 1), targets.flatten())


LLAMA: Plan = {
    "embed": Vocabulary(), "layer": Split(), "q_norm": Partial(), "*norm": Tokens(),
    "[qkv]": Column(together=4), "out": Row(), "gate": Column(), "up": Column(), "down": Row(),
    "head": Vocabulary(), "logits": Join(), "loss": Vocabulary(),
}  # fmt: skip


def _model(name: str) -> tuple[nn.Module, Plan, int]:
    """A model with values that are not those of an initialisation, its plan, and its vocabulary."""
    torch.manual_seed(3)
    spec = TIED if name == "tied" else SMALL.model_copy(update={"tied_head": False})
    model = (Llama() if name == "llama" else GPT(spec)).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
    return model, LLAMA if name == "llama" else gpt_plan(spec), 48 if name == "llama" else 64


def _against_one_process(
    name: str, inner: Mapping[str, int], tensor: int, sequence: bool
) -> tuple[float, float]:
    """The largest relative error of loss, gradients and logits; the loss."""
    topology = lowband.Topology(inner, lowband.Axes(tensor=tensor, sequence_parallel=sequence))
    whole, plan, vocabulary = _model(name)
    cut = lowband.parallelize(copy.deepcopy(whole), plan, topology)
    tokens, targets = torch.randint(vocabulary, (2, 2, 16))
    targets[0, :5] = -100
    for _ in range(2):  # a second backward adds
        mine, theirs = cut(tokens, targets), whole(tokens, targets)
        mine.backward()
        theirs.backward()
    errors = [abs(mine.item() / theirs.item() - 1)]
    along = along_tensor(cut)
    assert along is not None
    for part, full in zip(cut.parameters(), whole.parameters(), strict=True):
        assert part.grad is not None
        assert full.grad is not None
        grad, of = part.grad, slice_of(part)
        if is_partial(part):
            grad = along.summed(grad, SHARED_REDUCE, "test")
        expected = full.grad if of is None else of.cut(full.grad)
        errors.append(((grad - expected).abs().max() / expected.abs().max()).item())
    with torch.no_grad():
        logits = cut(tokens)
        errors.append(((logits - whole(tokens)).abs().max() / logits.abs().max()).item())
    return max(errors), mine.item()


@pytest.mark.parametrize("sequence", [False, True])
@pytest.mark.parametrize(
    ("name", "inner", "tensor"),
    [
        ("gpt", {}, 2),
        ("tied", {"node": 2}, 4),  # by hops over two levels
        ("llama", {}, 4),
        pytest.param("llama", {"package": 2, "node": 2}, 2, marks=pytest.mark.wide),
        pytest.param("tied", {}, 2, marks=pytest.mark.wide),
        pytest.param("gpt", {"package": 2}, 4, marks=pytest.mark.wide),
    ],
)
def test_gradients_are_those_of_one_process(
    name: str, inner: dict[str, int], tensor: int, sequence: bool
) -> None:
    found = on_ranks(tensor, _against_one_process, name, inner, tensor, sequence)
    assert max(error for error, _ in found) < 1e-12
    assert len({loss for _, loss in found}) == 1  # bit for bit


def _one_rank() -> bool:
    whole, plan, _ = _model("gpt")
    before = [*whole.parameters()]
    module = lowband.parallelize(whole, plan, lowband.Topology({}))
    return all(a is b for a, b in zip(before, module.parameters(), strict=True))


def test_one_tensor_rank_changes_nothing() -> None:
    assert on_ranks(1, _one_rank) == [True]


def _sent_for_products(entering_apart: bool) -> float:
    """Bytes of a step's backward for inputs of column products, of a block of Llama."""
    module, _, vocabulary = _model("llama")
    plan = {key: rule for key, rule in LLAMA.items() if isinstance(rule, (Column, Row))}
    topology = lowband.Topology({}, lowband.Axes(tensor=2))
    lowband.parallelize(module, plan, topology)
    along = along_tensor(module)
    assert along is not None
    if entering_apart:  # as if each product were given a tensor of its own
        for product in (module.q, module.k, module.v, module.gate, module.up):
            product.register_forward_pre_hook(lambda _, inputs: (inputs[0].clone(),))  # type: ignore[union-attr]
    tokens = torch.randint(vocabulary, (2, 16))
    module(tokens, tokens).backward()
    return sum(sent.bytes for sent in along.ledger.take() if sent.collective == "enter_reduce")


def test_products_of_one_input_send_its_gradient_once() -> None:
    """torch's plan with an input for each product sends 5 instead of 2; see the bytes of an all-reduce."""
    values = 2 * 16 * 32
    assert on_ranks(2, _sent_for_products, False) == [2 * values * 8] * 2
    assert on_ranks(2, _sent_for_products, True) == [5 * values * 8] * 2


class _WithDropout(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(8, 8), nn.Dropout(0.1))


def _refusals() -> list[str]:
    topology = lowband.Topology({}, lowband.Axes(tensor=2))
    sequence = lowband.Topology({}, lowband.Axes(tensor=2, sequence_parallel=True))
    rank = topology.rank

    def said(module: nn.Module, plan: Plan, on: lowband.Topology = topology) -> str:
        return refusal(lowband.parallelize, module, plan, on)

    cut = lowband.parallelize(nn.Sequential(nn.Linear(8, 8)), {"0": Column()}, topology)
    torch.manual_seed(rank)
    other = nn.Sequential(nn.Linear(8, 8))
    torch.manual_seed(0)
    mixed: Any = nn.Sequential(nn.Embedding(8, 8), nn.Linear(8, 6), nn.LayerNorm(8))
    texts = [
        said(cut, {"0": Column()}),
        said(mixed, {"blocks.*": Column()}),
        said(mixed, {"2": Column()}),
        said(mixed, {"1": Column(parts=3, together=2)}),
        said(mixed, {"1": Column()}, sequence),
        said(_WithDropout(), {"0": Column()}),
        said(other, {"0": Column()}),
    ]
    module = lowband.parallelize(GPT(SMALL), gpt_plan(SMALL), sequence)
    with pytest.raises(UserError, match=r"'blocks.0': 15 tokens cannot be divided over tensor 2"):
        module(torch.zeros(1, 15, dtype=torch.long))
    with pytest.raises(IndexError, match="index out of range"):
        module(torch.full((1, 16), 64))
    return texts


def test_what_cannot_be_cut_is_refused_in_one_line() -> None:
    first, second = on_ranks(2, _refusals)
    assert first == second
    assert first[:-1] == [
        "Sequential: the module is already sharded or cut (allowed: one parallelize, before shard)",
        "plan for Sequential: no module is named 'blocks.*'",
        "Column of '2': the module is of type LayerNorm (allowed: Linear)",
        "Column of '1': 6 out_features in 3 parts, each in groups of 2, cannot be divided over tensor 2",
        "sequence_parallel: no rule says whether '0.weight' sees all tokens (allowed: a rule for every "
        "parameter: Tokens() between products, Whole() elsewhere)",
        "'1': dropout 0.1: tensor ranks would draw different random numbers (allowed: dropout 0)",
    ]
    assert "differs from rank 0 in sum of initial weights" in first[-1]


def test_rules_are_read_in_order() -> None:
    plan: Plan = {"a.*": Whole(), "*": Row()}
    assert rule_of("a.b", plan) == Whole()
    assert rule_of("b", plan) == Row()


class _Flat(nn.Module):
    """Its second product has the tokens of all sequences in one dimension, as several of Hugging Face's."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(x).flatten(0, 1)).view(x.shape)


def _flat() -> list[str]:
    sequence = lowband.Topology({}, lowband.Axes(tensor=2, sequence_parallel=True))
    x = torch.zeros(2, 4, 8)
    found = []
    for module, plan, given in (
        (nn.Sequential(_Flat()), {"0.up": Column(), "0.down": Row()}, x),
        (nn.Sequential(nn.Linear(8, 16)), {"0": Column()}, x.flatten(0, 1)),
        (nn.Sequential(nn.Linear(16, 8)), {"0": Row()}, torch.zeros(2, 5, 8)),
    ):
        found.append(refusal(lowband.parallelize(module, plan, sequence), given))
    return found


def test_with_sequence_parallelism_tokens_are_dimension_1() -> None:
    allowed = "(allowed: [sequences, tokens, ..., features] with sequence parallelism)"
    assert on_ranks(2, _flat)[0] == [
        f"'0.down': activations [16, 8] {allowed}",
        f"'0': activations [8, 8] {allowed}",
        "'0': 5 tokens cannot be divided over tensor 2",
    ]


def _joined(parts: int) -> torch.Tensor:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(8, 12), nn.Identity())
    x = torch.randn(3, 8)
    expected = module(x).detach()
    plan = {"0": Column(parts=parts), "1": Join(parts)}
    lowband.parallelize(module, plan, lowband.Topology({}, lowband.Axes(tensor=2)))
    return (module(x) - expected).abs().max()


@pytest.mark.parametrize("parts", [1, 2, 3])
def test_joined_features_have_the_order_of_the_layer(parts: int) -> None:
    assert max(on_ranks(2, _joined, parts)) < 1e-6


def _dtypes() -> list[tuple[torch.dtype, torch.dtype, float]]:
    """Of a row's outputs and of a loss under autocast, and how far the loss is from that in fp32."""
    topology = lowband.Topology({}, lowband.Axes(tensor=2))
    torch.manual_seed(0)
    row = lowband.parallelize(nn.Sequential(nn.Linear(8, 8)), {"0": Row()}, topology)
    loss = lowband.parallelize(nn.Sequential(nn.CrossEntropyLoss()), {"0": Vocabulary()}, topology)[0]
    logits, targets = torch.randn(64, 16).bfloat16() * 8, torch.randint(16, (64,))
    mine = logits[:, 8 * topology.rank : 8 * topology.rank + 8]
    exact = F.cross_entropy(logits.float(), targets)
    with torch.autocast("cpu", torch.bfloat16):
        found = loss(mine, targets)
        return [(row(torch.ones(2, 4)).dtype, found.dtype, abs(float(found - exact)))]


def test_dtypes_under_autocast_are_torchs() -> None:
    for [(row, loss, error)] in on_ranks(2, _dtypes):
        assert (row, loss) == (torch.bfloat16, torch.float32)
        assert error < 1e-5
