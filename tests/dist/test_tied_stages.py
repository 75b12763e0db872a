"""Parameters that stages on several ranks share: gradients of one process, a closed form, one entry."""

from collections.abc import Callable
from copy import deepcopy
from functools import partial
from typing import Any, NamedTuple

import pytest
import staged
import torch
from modules import HIER3
from staged import CLIP, STEPS, D, Layer, Trained, batches, loss_of, on_axes, train
from torch import nn

import lowband
from lowband.engine.api import engine_of
from lowband.errors import UserError
from lowband.run.on_ranks import on_ranks
from lowband.spec.axes import Axes
from lowband.spec.mesh import Levels
from lowband.spec.schedules import lists
from lowband.spec.scheme import Scheme
from tests.checkout import CONFIG

WIDE = pytest.mark.wide
V = 33  # rows of the tied weight: no multiple of anything


class Head(nn.Module):
    """A norm of its own, and the weight of the embedding."""

    def __init__(self, embed: nn.Embedding) -> None:
        super().__init__()
        self.norm, self.out = nn.LayerNorm(D), nn.Linear(D, V, bias=False)
        self.out.weight = embed.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.norm(x))


class Within(nn.Module):
    """Uses the weight, too, in the middle of a chain, and one that the head does not have."""

    def __init__(self, embed: nn.Embedding, norm: nn.LayerNorm) -> None:
        super().__init__()
        self.weight, self.norm, self.scale = embed.weight, norm, nn.Parameter(torch.ones(D))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.norm(x * self.weight.sum(0)) * self.scale


def chain(layers: int, users: int = 2) -> list[nn.Module]:
    """users: of the embedding; the third one and the first layer share a norm, too"""
    torch.manual_seed(1)
    inner: list[nn.Module] = [Layer() for _ in range(layers)]
    embed = nn.Embedding(V, D)
    if users == 3:
        inner[layers // 2] = Within(embed, inner[0].norm)
    return [embed, *inner, Head(embed)]


# ---- in one process


def copies_of(
    modules: list[nn.Module], rank_of: list[int]
) -> tuple[list[nn.Module], list[list[nn.Parameter]]]:
    """The chain with modules of each rank's own; and of each parameter that several ranks have, the copies in
    the order of the chain."""
    memos: dict[int, dict[int, Any]] = {}
    chain = [deepcopy(m, memos.setdefault(rank, {})) for m, rank in zip(modules, rank_of, strict=True)]
    whole = [parameter for module in modules for parameter in module.parameters()]
    copies = [[memo[id(p)] for memo in memos.values() if id(p) in memo] for p in dict.fromkeys(whole)]
    return chain, [each for each in copies if len(each) > 1]


def alone(
    make: Callable[[], list[nn.Module]], rank_of: list[int], micro_batches: int, levels: Levels
) -> Trained:
    """Every rank has a copy of what it shares."""
    modules, copied = copies_of(make(), rank_of)
    return staged.alone(lambda: modules, micro_batches, levels, copied)


# ---- on ranks


class Case(NamedTuple):
    schedule: str
    ranks: int
    chunks: int
    micro_batches: int
    scheme: str | Scheme
    data: int
    layers: list[int]
    users: int = 2

    @property
    def rank_of(self) -> list[int]:
        """By module of the chain."""
        of_ranks = lists(self.schedule, self.ranks, self.micro_batches, self.chunks)
        places = {each.stage: rank for rank, of_rank in enumerate(of_ranks) for each in of_rank}
        return [places[stage] for stage, size in enumerate(self.layers) for _ in range(size)]

    @property
    def error(self) -> float:
        """A rank that uses the weight in several stages sums it in an order of its own."""
        used = [
            self.rank_of[place] for place in (0, sum(self.layers) // 2, -1)[:: 1 if self.users == 3 else 2]
        ]
        return 0 if len(set(used)) == len(used) else 1e-6

    @property
    def modules(self) -> Callable[[], list[nn.Module]]:
        return partial(chain, sum(self.layers) - 2, self.users)

    def run(self) -> list[Trained]:
        scheme = CONFIG.scheme(self.scheme) if isinstance(self.scheme, str) else self.scheme
        options = {"schedule": self.schedule, "chunks": self.chunks, "layers": self.layers}
        of_job = {"package": 2, "node": 4}, self.ranks, scheme, self.micro_batches, self.modules
        return on_ranks(self.ranks * self.data, partial(on_axes, **options), *of_job)


CASES = [
    Case("1f1b", 2, 1, 3, "zero3", 2, [1, 5]),
    Case("gpipe", 4, 1, 2, "zero1", 1, [2, 1, 2, 1]),
    Case("zb-h1", 2, 1, 4, "zero2", 2, [4, 2]),
    Case("interleaved", 2, 2, 2, "ddp", 2, [1, 1, 2, 2]),
    Case("1f1b", 4, 1, 1, "zero3", 1, [1, 2, 2, 1], users=3),
    pytest.param(Case("zb-v", 2, 2, 3, "zero3", 2, [2, 1, 2, 1], users=3), marks=WIDE),
    pytest.param(Case("breadth", 2, 2, 4, HIER3, 4, [1, 2, 2, 1], users=3), marks=WIDE),
    pytest.param(Case("zb-h2", 4, 1, 9, "zero3", 2, [2, 1, 1, 2], users=3), marks=WIDE),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.schedule}-{case.ranks}-{case.users}")
def test_bits_are_those_of_copies_whose_gradients_are_summed(case: Case) -> None:
    """Two steps with a clip that bites."""
    found, error = case.run(), case.error
    inner = {"package": min(2, case.data), "node": min(4, case.data)}
    levels = Levels.fit(inner, case.data)
    [expected] = on_ranks(1, alone, case.modules, case.rank_of, case.micro_batches, levels)
    losses = [losses for one in found for losses in one.losses if losses]
    theirs = [expected.losses[data + step * case.data] for data in range(case.data) for step in range(STEPS)]
    for ours, of_rank in zip(losses, theirs, strict=True):
        assert ours == pytest.approx(of_rank, rel=error, abs=0)
    assert {tuple(one.norms) for one in found} == {tuple(found[0].norms)}
    assert found[0].norms == pytest.approx(expected.norms, rel=max(error, 1e-12))
    state = {key: value for one in found for key, value in one.state.items()}
    assert sum(len(one.state) for one in found) == len(state)  # each entry is on one rank
    assert state.keys() == expected.state.keys()
    for key, value in state.items():
        torch.testing.assert_close(value, expected.state[key], rtol=error, atol=error)
    assert all(torch.equal(state["0.weight"], state[key]) for key in state if key.endswith("out.weight"))
    if case.micro_batches * case.data == 1:  # then copies' gradients are summed as autograd does
        [(losses, norms, whole, _)] = on_ranks(1, lambda: staged.plain(nn.Sequential(*case.modules()), 1))
        assert (losses, norms) == (expected.losses, pytest.approx(expected.norms, rel=1e-12))
        assert [key for key in state if not torch.equal(state[key], whole[key])] == []


def padded(numel: int, ranks: int) -> int:
    return -(-numel // (256 * ranks)) * 256 * ranks


@pytest.mark.parametrize("case", [CASES[0], CASES[1], CASES[4]], ids=["zero3", "zero1", "three users"])
def test_bytes_are_those_of_a_closed_form(case: Case) -> None:
    """Each user sends each other one its shard of the gradient and a checksum, once a step."""
    sent = sum(one.sent.get("tied_reduce", 0) for one in case.run())
    of_weight = case.users * (case.users - 1) * (padded(V * D, case.data) + 2 * case.data)
    of_norm = 0 if case.users == 2 else 2 * 2 * (padded(D, case.data) + 2 * case.data)
    assert sent == STEPS * 4 * (of_weight + of_norm)


# ---- what else a program may do


def pipe_of(scheme: str, micro_batches: int, users: int = 2, **options: Any) -> tuple[lowband.Pipeline, int]:
    """On two ranks along pipeline; and this rank's place along data."""
    topology = lowband.Topology({"package": 1, "node": 1}, Axes(pipeline=2))
    made = chain(2, users), loss_of, scheme, topology, micro_batches
    fp32 = {"compute_dtype": torch.float32, **options}
    return lowband.Pipeline(*made, **fp32), topology.along("data").place


def accumulated() -> tuple[dict[str, torch.Tensor], int]:
    """Gradients of two steps, of which the first one is not reduced; and bytes of the exchange."""
    pipe, _ = pipe_of("zero2", 2)
    with lowband.no_sync(pipe):
        pipe.step(batches(0, 0, 2))
    pipe.step(batches(1, 0, 2))
    sent = sum(row.bytes for row in engine_of(pipe).ledger.take() if row.collective == "tied_reduce")
    grads = {
        name: p.grad.as_subclass(torch.Tensor)[: p.shard_of.stop].view(p.shard_of.shape)
        for name, p in pipe.named_parameters()
    }
    return grads, sent


def accumulated_alone() -> dict[str, torch.Tensor]:
    model = nn.Sequential(*chain(2))
    for step in range(2):
        for tokens, targets in batches(step, 0, 2):
            loss_of(model(tokens), targets).backward()
    return {name: p.grad for name, p in model.named_parameters(remove_duplicate=False)}


def test_accumulation_over_steps_exchanges_once() -> None:
    found = on_ranks(2, accumulated)
    [expected] = on_ranks(1, accumulated_alone)
    assert [sent for _, sent in found] == [4 * (padded(V * D, 1) + 2)] * 2
    grads = {**found[0][0], **found[1][0]}
    assert grads.keys() == expected.keys()
    for name, grad in grads.items():
        torch.testing.assert_close(grad, expected[name], rtol=1e-5, atol=1e-7)


def replicas_and_wires(scheme: str) -> tuple[bool, dict[str, torch.Tensor]]:
    """Whether copies are equal after some steps, and this rank's state."""
    pipe, data = pipe_of(scheme, 2, users=3)
    train(pipe, data, 2, steps=5)
    return lowband.full_state_dict(pipe)


@pytest.mark.parametrize("scheme", ["zeropp", "local-sgd", pytest.param("diloco", marks=WIDE)])
def test_copies_stay_equal_on_quantized_wires_and_between_replicas(scheme: str) -> None:
    first, _, second, _ = on_ranks(4, replicas_and_wires, scheme)
    assert torch.equal(first["0.weight"], second["3.out.weight"])
    assert torch.equal(first["0.weight"], second["2.weight"])
    assert torch.equal(first["1.norm.weight"], second["2.norm.weight"])


def streamed() -> dict[str, torch.Tensor]:
    modules = chain(3)
    modules[2].norm = modules[1].norm  # one unit more on the first stage, before its copy of the embedding
    topology = lowband.Topology({"node": 1}, Axes(pipeline=2))
    sync = {"beyond": "node", "every": 2, "fragments": 2}
    scheme = Scheme(name="streamed", weights="node", grads="node", optim="node", sync=sync)
    pipe = lowband.Pipeline(modules, loss_of, scheme, topology, 2, layers=[3, 2], compute_dtype=torch.float32)
    return train(pipe, topology.along("data").place, 2, steps=5).state


def test_copies_are_exchanged_at_once_in_whichever_fragment_their_places_are() -> None:
    first, _, second, _ = on_ranks(4, streamed)
    assert torch.equal(first["0.weight"], second["4.out.weight"])


def differing(how: str) -> str:
    torch.set_num_threads(1)
    if how == "values":
        topology = lowband.Topology({}, Axes(pipeline=2))
        modules = chain(2)
        with torch.no_grad():
            modules[0].weight[3, 3] += topology.rank * 1e-6
        options = {"compute_dtype": torch.float32}
        pipe = lowband.Pipeline(modules, loss_of, "zero3", topology, 2, **options)
    else:  # the head's name is no embedding's
        pipe, _ = pipe_of("zero3", 2)
    named = dict(pipe.named_parameters())
    decayed = [p for name, p in named.items() if name.startswith("0.")]
    others = [p for name, p in named.items() if not name.startswith("0.")]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others}]
    optimizer = torch.optim.SGD([group for group in groups if group["params"]], lr=0.1)
    with pytest.raises(UserError) as error:
        for step in range(2):
            pipe.step(batches(step, 0, 2))
            assert how == "options"
            optimizer.step()
            optimizer.zero_grad()
    return str(error.value)


@pytest.mark.parametrize("how", ["values", "options"])
def test_copies_that_part_are_refused(how: str) -> None:
    for text in on_ranks(2, differing, how):
        assert text.startswith(
            "pipeline 0: the copies of '0.weight' on ranks [0, 1] of the axis differ (allo"
        )


# ---- cut along tensor, too


def on_three_axes(schedule: str, layers: list[int]) -> Trained:
    topology = lowband.Topology({"node": 2}, Axes(tensor=2, pipeline=2))
    torch.manual_seed(1)
    inner = [Layer() for _ in range(4)]
    embed = nn.Embedding(34, D)  # rows that two ranks divide
    head = nn.Linear(D, 34, bias=False)
    head.weight = embed.weight
    modules = nn.ModuleList([embed, *inner, head, nn.CrossEntropyLoss()]).double()
    plan = {
        "0": lowband.Vocabulary(), "*.up": lowband.Column(), "*.down": lowband.Row(),
        "5": lowband.Vocabulary(), "6": lowband.Vocabulary(),
    }  # fmt: skip
    *cut, loss = lowband.parallelize(modules, plan, topology)
    pipe = lowband.Pipeline(
        cut, lambda x, y: loss(x.flatten(0, 1), y.flatten()), "zero3", topology, 3, schedule,
        layers=layers, compute_dtype=torch.float64,
    )  # fmt: skip
    return train(pipe, topology.along("data").place, 3)


def alone_in_fp64() -> tuple[list[float], dict[str, torch.Tensor]]:
    torch.manual_seed(1)
    inner = [Layer() for _ in range(4)]
    embed = nn.Embedding(34, D)
    head = nn.Linear(D, 34, bias=False)
    head.weight = embed.weight
    model = nn.Sequential(embed, *inner, head).double()
    parameters = list(model.parameters())
    optimizer, norms = torch.optim.AdamW(parameters, lr=1e-2), []
    for step in range(STEPS):
        optimizer.zero_grad()
        for data in range(2):
            for tokens, targets in batches(step, data, 3):
                (loss_of(model(tokens), targets) / 2).backward()
        norms.append(float(torch.stack([p.grad.norm() for p in parameters]).norm()))
        for p in parameters:
            p.grad *= CLIP / norms[-1]
        optimizer.step()
    return norms, dict(model.state_dict())


@pytest.mark.parametrize(
    ("schedule", "layers"), [("1f1b", [2, 4]), pytest.param("zb-h1", [1, 5], marks=WIDE)]
)
def test_stages_that_are_cut_along_tensor(schedule: str, layers: list[int]) -> None:
    found = on_ranks(8, on_three_axes, schedule, layers)
    [(norms, expected)] = on_ranks(1, alone_in_fp64)
    assert {tuple(one.norms) for one in found} == {tuple(found[0].norms)}
    assert found[0].norms == pytest.approx(norms, rel=1e-6)
    state = {key: value for one in found for key, value in one.state.items()}
    assert state.keys() == expected.keys()
    for key, value in expected.items():
        torch.testing.assert_close(state[key], value.float(), rtol=1e-5, atol=1e-6)
