"""What a user tries with layers of experts beside training them: it is right, or refused on every rank."""

import copy
import warnings
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from near import assert_near
from own_experts import EXPERTS, ONE, WIDTH, H, Layer, model_of
from safetensors.torch import load_file
from torch import nn

import lowband
from lowband.run.on_ranks import on_ranks
from tests.checkout import CONFIG


def _written(folder: Path) -> dict[str, torch.Tensor]:
    """Sharded from nothing but an init, written, and read again into experts on other ranks."""

    def init(name: str, parameter: torch.Tensor) -> None:
        parameter.zero_() if name.endswith("router.bias") else parameter.normal_()

    written: dict[str, torch.Tensor] = {}
    for expert in (2, 1):
        topology = lowband.Topology({}, lowband.Axes(expert=expert))
        with torch.device("meta"):
            model = lowband.spread_experts(model_of(), topology)
        source = init if expert == 2 else lowband.Safetensors(folder)
        lowband.shard(model, "zero3", topology, Layer, torch.float32, init=source, device="cpu")
        whole = lowband.full_state_dict(model)
        if expert == 2:
            lowband.save_safetensors(model, folder)
            written = whole
        else:
            assert all(torch.equal(value, written[name]) for name, value in whole.items())
    return written


def test_files_have_whole_layers_of_experts(tmp_path: Path) -> None:
    expected = on_ranks(2, _written, tmp_path / "model")[0]
    stored: dict[str, torch.Tensor] = {}
    for file in (tmp_path / "model").glob("*.safetensors"):
        stored |= load_file(file)
    assert stored["1.mixture.experts.up"].shape == (EXPERTS, WIDTH, H)
    assert stored.keys() == expected.keys()
    assert all(torch.equal(value, expected[name]) for name, value in stored.items())


# ---- what is refused, on every rank, in a line


def spread(model: nn.Module | None = None, inner: Any = None) -> tuple[nn.Module, lowband.Topology]:
    topology = lowband.Topology(inner or {}, lowband.Axes(expert=2))
    return lowband.spread_experts(model_of() if model is None else model, topology), topology


def sharded(scheme: str = "zero3") -> nn.Module:
    model, topology = spread()
    return lowband.shard(model, scheme, topology, Layer, torch.float32)


def twice() -> None:
    model, topology = spread()
    lowband.spread_experts(model, topology)


def after_shard() -> None:
    spread(sharded())


def after_a_part_was_sharded() -> None:
    model = model_of()
    lowband.shard(model[1], "zero3", lowband.Topology({}), Layer)
    spread(model)


def without_experts() -> None:
    spread(nn.Linear(H, H))


def not_divided() -> None:
    spread(model_of(lowband.Routing(3, 1)))


def of_ones_own() -> None:
    model = model_of()
    model[1].mixture.experts = nn.ModuleList(nn.Linear(H, H) for _ in range(EXPERTS))
    spread(model)


def with_a_hook() -> None:
    model = model_of()
    model[1].mixture.experts.up.register_hook(lambda gradient: gradient / 2)
    spread(model)


def in_parts_beside_copies() -> None:
    axes = lowband.Axes(expert=2, copies=1, route_parts=2)
    lowband.spread_experts(model_of(), lowband.Topology({}, axes))


def in_parts_on_a_rank() -> None:
    lowband.spread_experts(model_of(), lowband.Topology({}, lowband.Axes(route_parts=2)))


def on_another_topology() -> None:
    model, _ = spread()
    lowband.shard(model, "zero3", lowband.Topology({}, lowband.Axes(expert=2)), Layer)


def cut_along_tensor() -> None:
    """Of every tensor rank experts are whole; only what is around them can be cut."""
    topology = lowband.Topology({}, lowband.Axes(tensor=2))
    lowband.parallelize(model_of(), {"*.experts": lowband.Column()}, topology)


def replaced() -> None:
    with torch.device("meta"):
        model = model_of()
    model, topology = spread(model)
    lowband.shard(model.to_empty(device="cpu"), "zero3", topology, Layer)


def copied() -> None:
    copy.deepcopy(spread()[0])


def copied_sharded() -> None:
    copy.deepcopy(sharded())


def seldom(beyond: str) -> lowband.Scheme:
    scheme = CONFIG.scheme("local-sgd")
    places = dict.fromkeys(("weights", "grads", "optim"), beyond)
    return scheme.model_copy(update={**places, "sync": scheme.sync.model_copy(update={"beyond": beyond})})


def that_meet_seldom() -> None:
    model, topology = spread()
    lowband.shard(model, seldom("self"), topology, Layer)


def balanced_over_seldom_met_links() -> None:
    model = lowband.shard(model_of(), seldom("self"), lowband.Topology({}), Layer)
    lowband.balance_experts(model)


def as_matrices() -> None:
    lowband.Matrices(sharded(), select=lambda name, shape: "experts" in name)


def by_lamb() -> None:
    model = sharded()
    model(torch.randn(3, H)).sum().backward()
    lowband.Lamb(model.parameters()).step()


def by_norms() -> None:
    lowband.norms(sharded().parameters())


def given_a_whole_state() -> None:
    model = model_of()
    whole = {name: value.clone() for name, value in model.state_dict().items()}
    spread(model)[0].load_state_dict(whole)


def from_a_peer() -> None:
    lowband.load_peer_checkpoint("nowhere", sharded())


def balanced_outside() -> None:
    lowband.balance_experts(nn.Sequential(sharded()))


REFUSED = {
    twice: "'1.mixture': its experts are already spread (allowed: one spread_experts)",
    after_shard: "already sharded (allowed: spread_experts before shard)",
    after_a_part_was_sharded: "already sharded (allowed: spread_experts before shard)",
    without_experts: "no layer of experts (allowed: MixtureOfExperts)",
    not_divided: "'1.mixture': 3 experts cannot be divided over expert 2",
    of_ones_own: "'1.mixture.experts.0.weight' has shape [8, 8] (allowed: [4, ...]",
    with_a_hook: "a hook on '1.mixture.experts.up' would not run any more (allowed: hooks on modules; p.grad",
    in_parts_beside_copies: "experts: route_parts 2 beside copies 1 (allowed: 1; with expert 2 or more and c",
    in_parts_on_a_rank: "experts: route_parts 2 beside expert 1 (allowed: 1; with expert 2 or more and copi",
    on_another_topology: "over the axis of another Topology (allowed: one Topology",
    cut_along_tensor: "Column of '1.mixture.experts': the module is of type Experts (allowed: Linear",
    replaced: "'1.mixture.experts.up' was replaced after lowband.spread_experts",
    copied: "deepcopy before lowband.spread_experts",
    copied_sharded: "copied",
    that_meet_seldom: "(allowed: schemes without sync)",
    balanced_over_seldom_met_links: "would sum the load of experts over their links at every step",
    as_matrices: "is cut over expert ranks, none of which has the whole matrix",
    by_lamb: "is cut over expert ranks, whose parts are not summed",
    by_norms: "whose parts are not summed (allowed: lowband.clip_grad_norm_(module, max_norm); an optimizer",
    given_a_whole_state: "'1.mixture.experts.up' is whole, and cut over expert ranks in the module (allowed",
    from_a_peer: "experts are spread over ranks",
    balanced_outside: "'0' in it is sharded, and not the module itself",
}


def _said() -> list[tuple[str, str]]:
    found = []
    for case in REFUSED:
        try:
            case()
        except Exception as error:
            found.append((type(error).__name__, str(error)))
        else:
            found.append(("", "nothing"))
    return found


@cache
def said() -> list[list[tuple[str, str]]]:
    return on_ranks(2, _said)


@pytest.mark.parametrize("case", REFUSED, ids=lambda case: case.__name__)
def test_what_cannot_be_right_is_refused_on_every_rank(case: Any) -> None:
    for of_rank in said():
        kind, words = of_rank[list(REFUSED).index(case)]
        assert kind == "UserError", words
        assert REFUSED[case] in words and "\n" not in words


# ---- what is warned of


def _drawn(how: str) -> list[str]:
    """What is said of experts that are drawn, or taken from a dense layer, after they were spread."""
    model, topology = spread()
    torch.manual_seed(torch.distributed.get_rank() if how == "by rank" else 1)
    with warnings.catch_warnings(record=True) as found, torch.no_grad():
        warnings.simplefilter("always")
        for parameter in model[1].mixture.experts.parameters() if how else ():
            parameter.copy_(torch.randn(parameter.shape[how == "one" :]))
        lowband.shard(model, "zero3", topology, Layer, torch.float32)
    return [str(each.message) for each in found if "experts" in str(each.message)]


def test_experts_that_are_the_same_on_all_ranks_are_warned_of() -> None:
    quiet = [[]] * 2
    assert [on_ranks(2, _drawn, how) for how in ("", "by rank", "one")] == [quiet] * 3
    for [text] in on_ranks(2, _drawn, "alike"):
        assert "'1.mixture.experts.up' on rank 1 has the values of that on rank 0, of others" in text


# ---- what works


def _balanced_in_one_replica() -> dict[str, list[int]]:
    """The whole job is a replica, as one of `lowband.Quorum`: no link between replicas is crossed."""
    model = lowband.shard(model_of(), seldom("node"), lowband.Topology({"node": 2}), Layer, torch.float32)
    rows = 3 + torch.distributed.get_rank()
    model(torch.randn(rows, H)).sum().backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    return {name: load.tolist() for name, load in lowband.balance_experts(model).items()}


def test_a_job_that_is_one_replica_balances_its_experts() -> None:
    first, second = on_ranks(2, _balanced_in_one_replica)
    assert first == second
    assert {sum(load) for load in first.values()} == {7 * model_of()[1].mixture.router.routing.top_k}


class OneByOne(nn.Module):
    """Experts of a user's own, a loop over those that have rows: with none it computes nothing."""

    def __init__(self, of: nn.Module) -> None:
        super().__init__()
        self.up, self.down = of.up, of.down

    def forward(
        self, x: torch.Tensor, counts: torch.Tensor, places: torch.Tensor, weights: torch.Tensor | None = None
    ) -> torch.Tensor:
        out, begin = x.new_zeros(len(places), x.shape[1]), 0
        for expert, rows in enumerate(counts.tolist()):
            if rows:
                own = slice(begin, begin + rows)
                out[own] = torch.relu(x[places[own]] @ self.up[expert].mT) @ self.down[expert].mT
                begin += rows
        return out if weights is None else out * weights.unsqueeze(1)


def _without_rows(route: str) -> list[tuple[str, torch.Tensor]]:
    """A step in which every token goes to experts of the first rank."""
    topology = lowband.Topology({}, lowband.Axes(expert=2, route=route))
    model = model_of(ONE)
    for layer in (model[1], model[2]):
        layer.mixture.experts = OneByOne(layer.mixture.experts)
    bias = torch.full((EXPERTS, 1), -5.0)
    bias[0] = 5.0
    with torch.no_grad():
        for layer in (model[1], model[2]):
            layer.norm.weight.zero_()
            layer.norm.bias.fill_(1)
            layer.mixture.router.weight.copy_(bias.expand(EXPERTS, H) / H)
    lowband.spread_experts(model, topology)
    lowband.shard(model, "zero3", topology, Layer, torch.float32)
    x = torch.ones(3, H) * (1 + torch.distributed.get_rank())
    model(x).square().mean().backward()
    return [(name, p.grad.clone().as_subclass(torch.Tensor)) for name, p in model.named_parameters()]


@pytest.mark.parametrize("route", ["flat", "merged"])
def test_own_experts_that_get_no_rows_send_gradients_back(route: str) -> None:
    for of_rank in on_ranks(2, _without_rows, route):
        assert all(grad.isfinite().all() for _, grad in of_rank)


def _copied_before() -> list[bool]:
    """A copy of a whole module, and one that is given other experts, compute with their own."""
    model = model_of()
    other = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in other[1].mixture.experts.parameters():
            parameter.zero_()
    x = torch.randn(5, H)
    is_apart = not torch.equal(model[1](x), x) and torch.equal(other[1](x), x)
    model[1].mixture.experts = other[1].mixture.experts
    return [is_apart, torch.equal(model[1](x), x)]


def test_a_layer_computes_with_the_experts_that_it_has() -> None:
    assert on_ranks(1, _copied_before) == [[True, True]]


def _shared(ranks: int) -> dict[str, torch.Tensor]:
    """Two layers with the same experts, and routers of their own; after a step."""
    model = model_of(ONE)
    model[2].mixture.experts, model[2].again = model[1].mixture.experts, False
    topology = lowband.Topology({}, lowband.Axes(expert=ranks))
    lowband.spread_experts(model, topology)
    lowband.shard(model, "zero3", topology, Layer, torch.float32)
    x = torch.randn(8, H, generator=torch.Generator().manual_seed(1)).chunk(ranks)
    model(x[torch.distributed.get_rank()]).square().mean().backward()
    torch.optim.SGD(model.parameters(), lr=1.0).step()
    return lowband.full_state_dict(model)


def test_layers_may_share_their_experts() -> None:
    expected, found = (on_ranks(ranks, _shared, ranks)[0] for ranks in (1, 2))
    assert_near(found, expected, rtol=1e-4, atol=1e-6)
