"""Any division of gradients into buckets gives the same bits and bytes, in fewer submissions."""

import weakref
from collections import Counter
from collections.abc import Callable
from functools import partial
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from modules import INNER, HalfFrozen, Tower, inputs, is_layer
from torch import nn
from torch.utils.checkpoint import checkpoint

import lowband
from lowband.cost.memory import state_bytes
from lowband.engine.collectives.collectives import Collectives
from lowband.engine.passes.engine import engine_of
from lowband.engine.units.gradients import Taken
from lowband.run.on_ranks import on_ranks
from lowband.spec import buckets, partition
from lowband.spec.buckets import BUCKET_NUMEL
from lowband.spec.mesh import Levels
from lowband.spec.partition import ALIGN, UnitLayout
from lowband.spec.records import by_row
from lowband.spec.step import Pattern
from tests.checkout import CONFIG

SOME = 3 * 1024  # elements: two or three units of the tower, by the number of ranks


class Routed(Tower):
    """Each rank's data go through a layer of its own, beside the shared ones."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mine = self.layers[dist.get_rank() % 2]
        x = mine(self.first(x))
        return (self.layers[2](x) * self.scale).square().mean()


def is_inner(module: nn.Module) -> bool:
    return is_layer(module) and len(module) < 4  # not the chain


def each(model: nn.Module, step: int) -> None:
    model(inputs(step, dist.get_rank())).backward()


def accumulating(model: nn.Module, step: int) -> None:
    with lowband.no_sync(model):
        each(model, step)
    each(model, step + 10)


def penalised(model: nn.Module, step: int) -> None:
    """The graph of the gradients is kept."""
    x = inputs(step, dist.get_rank()).requires_grad_()
    loss = model(x)
    [by_x] = torch.autograd.grad(loss, x, create_graph=True)
    (loss + by_x.square().sum()).backward(create_graph=True)


def twice(model: nn.Module, step: int) -> None:
    """Gradients that accumulate in the optimizer's parameters."""
    each(model, step)
    each(model, step + 10)


def breadth(model: nn.Module, step: int) -> None:
    parts = [inputs(step, dist.get_rank()), inputs(step + 10, dist.get_rank())]
    lowband.accumulate(model, parts, lambda part: model(part).square().mean())


def chain() -> nn.Module:
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(5, 7), *(nn.Sequential(nn.Linear(7, 7), nn.Tanh()) for _ in range(3)))


PROGRAMS: dict[str, tuple[Callable[[], nn.Module], Callable[[nn.Module, int], None], Pattern]] = {
    "plain": (Tower, each, "hops"),
    "joined": (Tower, each, "joined"),
    "no_sync": (Tower, accumulating, "hops"),
    "penalised": (Tower, penalised, "hops"),
    "twice": (Tower, twice, "hops"),
    "breadth": (chain, breadth, "hops"),
    "late": (partial(Tower, checkpointing=True, reentrant=True), each, "hops"),
    "frozen": (HalfFrozen, each, "hops"),
    "routed": (Routed, each, "hops"),
}


def trained(name: str, topology: lowband.Topology, most: int, overlap: bool = True):
    """Weights, what was sent and held in the last step, submissions of it by name, units."""
    make, backward, pattern = PROGRAMS[name]
    with patch.object(buckets, "BUCKET_NUMEL", most):
        model = lowband.shard(
            make(), "ddp", topology, is_inner, torch.float32, overlap=overlap, collectives=pattern
        )
    engine, submitted, submit = engine_of(model), Counter[str](), Collectives.submit
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=1e-2)

    def counted(self: Collectives, unit: str, *arguments, **named):
        submitted[unit] += 1
        return submit(self, unit, *arguments, **named)

    for step in range(2):
        engine.ledger.take()
        submitted.clear()
        with patch.object(Collectives, "submit", counted):
            backward(model, step)
        lowband.clip_grad_norm_(model, 0.5)
        optimizer.step()
        optimizer.zero_grad()
    sent = by_row(engine.ledger.take())
    peak = dict(engine.meter.peak)
    return lowband.full_state_dict(model), sent, submitted, peak, [u.layout.numel for u in engine.units]


def divided(names: list[str], inner: dict[str, int]):
    topology = lowband.Topology(inner)
    found = {}
    for name in names:
        found[name] = [trained(name, topology, most) for most in (0, SOME, BUCKET_NUMEL)]
        found[name].append(trained(name, topology, BUCKET_NUMEL, overlap=False))
    return found


THREE = {"package": 3}


@pytest.mark.parametrize(
    ("ranks", "inner", "names"),
    [
        pytest.param(2, INNER, [*PROGRAMS], marks=pytest.mark.wide),
        (4, INNER, ["plain", "breadth", "late", "routed"]),
        pytest.param(4, INNER, [*PROGRAMS], marks=pytest.mark.wide),
        (3, THREE, ["no_sync", "joined", "penalised", "twice", "frozen"]),
        pytest.param(3, THREE, [name for name in PROGRAMS if name != "routed"], marks=pytest.mark.wide),
    ],
)
def test_bits_and_bytes_do_not_depend_on_the_division(
    ranks: int, inner: dict[str, int], names: list[str]
) -> None:
    for found in on_ranks(ranks, divided, names, inner):
        for name, ((weights, sent, by_unit, *_), *others) in found.items():
            for other, also_sent, submitted, *_ in others:
                assert all(torch.equal(weights[key], other[key]) for key in weights), name
                if name != "late":  # a bucket with late gradients is reduced as a whole again
                    assert also_sent == sent, name
                assert 0 < submitted.total() < by_unit.total(), name


def test_submissions_are_buckets_and_their_buffers_closed_forms() -> None:
    for found in on_ranks(2, divided, ["plain"], INNER):
        names = [set(submitted) for _, _, submitted, *_ in found["plain"]]
        assert names[0] == {"root", "layers.0", "layers.1", "layers.2"}
        assert names[1] == {"layers.2 to layers.0", "root"}
        assert names[2] == names[3] == {"layers.2 to root"}
        levels = Levels.fit(INNER, 2)
        for most, (*_, peak, units) in zip((0, SOME, BUCKET_NUMEL), found["plain"], strict=False):
            with patch.object(buckets, "BUCKET_NUMEL", most):
                held = state_bytes(units, CONFIG.scheme("ddp"), levels, "fp32", "fp32", 1, "gloo")
            assert peak["buffers"] == held["buffers"]


def piecewise(inner: dict[str, int]):
    topology = lowband.Topology(inner)
    whole = trained("plain", topology, BUCKET_NUMEL)
    with patch.object(partition, "AT_ONCE", 3 * ALIGN):
        return whole, trained("plain", topology, BUCKET_NUMEL)


@pytest.mark.parametrize(("ranks", "inner"), [(2, INNER), (4, INNER), (3, {"package": 3})])
def test_pieces_give_the_same_bits_and_bytes_and_hold_less(ranks: int, inner: dict[str, int]) -> None:
    for (weights, sent, _, most, units), (other, also_sent, _, held, _) in on_ranks(ranks, piecewise, inner):
        assert all(torch.equal(weights[key], other[key]) for key in weights)
        assert also_sent == sent
        assert held["buffers"] < most["buffers"]
        with patch.object(partition, "AT_ONCE", 3 * ALIGN):
            levels = Levels.fit(inner, ranks)
            expected = state_bytes(units, CONFIG.scheme("ddp"), levels, "fp32", "fp32", 1, "gloo")
        assert held["buffers"] == expected["buffers"]


def test_gradients_are_freed_as_soon_as_they_have_moved() -> None:
    grad = torch.ones(2, 3)
    freed, taken = weakref.ref(grad), Taken([grad, None], [])
    del grad
    layout = UnitLayout.of([(2, 3), (5,)], world=1)
    flat = torch.full((layout.numel,), 7.0)
    taken.move_to(flat, layout)
    assert freed() is None
    assert flat.tolist() == [1.0] * 6 + [0.0] * (layout.numel - 6)


def held_gradients(inner: dict[str, int]) -> list[tuple[bool, bool]]:
    """Per step, whether the gradients are where the last step's were, and whether one that was held stayed as
    it was. One is held from the second step on."""
    model = lowband.shard(Tower(), "ddp", lowband.Topology(inner), is_inner, torch.float32)
    first, found, place, held = next(model.parameters()), [], 0, None
    for step in range(4):
        each(model, step)
        now = first.grad.as_subclass(torch.Tensor)
        was, place = place, now.data_ptr()
        found.append((place == was, held is None or torch.equal(*held)))
        if step == 1:
            held = now, now.clone()
        del now
        model.zero_grad()
    return found


def test_the_next_gradients_take_the_memory_of_the_last_unless_somebody_has_them() -> None:
    for inner in (INNER, {}):
        for found in on_ranks(2, held_gradients, inner):
            assert found == [(False, True), (True, True), (False, True), (True, True)]


def mixed(most: int) -> dict[str, torch.Tensor]:
    """Layers 0 and 2 whole on every rank, layer 1 and the root sharded."""
    topology = lowband.Topology(INNER)
    with patch.object(buckets, "BUCKET_NUMEL", most):
        model = lowband.shard(
            Tower(), "zero3", topology, is_layer, torch.float32,
            placement_of=lambda name, _: "ddp" if name in ("layers.0", "layers.2") else None,
        )  # fmt: skip
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for step in range(3):
        each(model, step)
        optimizer.step()
        optimizer.zero_grad()
    return lowband.full_state_dict(model)


def test_a_bucket_across_units_of_another_placement() -> None:
    for alone, together in zip(on_ranks(4, mixed, 0), on_ranks(4, mixed, BUCKET_NUMEL), strict=True):
        assert all(torch.equal(alone[key], together[key]) for key in alone)


class Shared(Tower):
    """A layer is used in a checkpoint of its own, whose backward is another graph task, and outside of it."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first, second, third = self.layers
        x = checkpoint(first, self.first(x), use_reentrant=True)
        return (third(first(second(x))) * self.scale).square().mean()


def within(model: nn.Module, x: torch.Tensor) -> None:
    """Another backward of the module runs in a hook of its backward."""
    other = model(x + 1)
    x = x.requires_grad_()
    loss = model(x) * 1.0
    x.register_hook(lambda _: other.backward())
    loss.backward()


LATE: list[tuple[type[Tower], Callable[[nn.Module, torch.Tensor], None]]] = [
    (Shared, lambda model, x: model(x).backward()),
    (Tower, within),
]


def late(program: int, inner: dict[str, int], most: int) -> dict[str, torch.Tensor]:
    make, backward = LATE[program]
    with patch.object(buckets, "BUCKET_NUMEL", most):
        model = lowband.shard(make(), "ddp", lowband.Topology(inner), is_layer, torch.float32)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        backward(model, inputs(step, dist.get_rank()))
        optimizer.step()
        optimizer.zero_grad()
    return lowband.full_state_dict(model)


@pytest.mark.parametrize("program", range(len(LATE)), ids=["shared", "within"])
@pytest.mark.parametrize(
    ("ranks", "inner"), [pytest.param(2, INNER, marks=pytest.mark.wide), (3, {"package": 3})]
)
def test_gradients_that_come_late_are_in_the_sum(ranks: int, inner: dict[str, int], program: int) -> None:
    make, backward = LATE[program]
    alone = make()
    optimizer = torch.optim.SGD(alone.parameters(), lr=0.1)
    for step in range(3):
        for rank in range(ranks):
            backward(alone, inputs(step, rank))
        for parameter in alone.parameters():
            if parameter.grad is not None:
                parameter.grad /= ranks
        optimizer.step()
        optimizer.zero_grad()
    for most in (0, SOME, BUCKET_NUMEL):
        found = on_ranks(ranks, late, program, inner, most)[0]
        for key, value in alone.state_dict().items():
            torch.testing.assert_close(found[key], value, rtol=0, atol=1e-6, msg=f"{most}: {key}")
