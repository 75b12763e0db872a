"""What a step of lowband.shard gathers, holds, sends and survives."""

from itertools import product

import pytest
import torch
import torch.distributed as dist
from modules import HIER3, HPZ, INNER, STEPS, Adapted, HalfFrozen, Tower, inputs, is_layer, sgd, sharded
from torch import nn

import lowband
from lowband.cost.bytes import sent_bytes
from lowband.engine.passes.engine import engine_of
from lowband.engine.units.states import UnitState
from lowband.run.on_ranks import on_ranks
from lowband.spec.records import by_row
from lowband.spec.scheme import Scheme
from tests.pairwise import pairwise

CHECKPOINTING = [(False, False), (True, False), (True, True)]


def count_checkpointed(topology: lowband.Topology, checkpointing: tuple[bool, bool], scheme: Scheme):
    """Bytes of the second step, and their closed form."""
    model = lowband.shard(Tower(*checkpointing), scheme, topology, is_layer, compute_dtype=torch.float32)
    engine, optimizer = engine_of(model), sgd(model.parameters())
    for step in range(2):
        engine.ledger.take()
        model(inputs(step, dist.get_rank())).backward()
        optimizer.step()
        optimizer.zero_grad()
    sent = by_row(engine.ledger.take())
    units = [unit.layout.numel for unit in engine.units]
    return sent, sent_bytes(units, scheme, topology.levels, "fp32", "fp32", 1, False)


def count_all(scheme: Scheme):
    topology = lowband.Topology(INNER)
    return {each: count_checkpointed(topology, each, scheme) for each in CHECKPOINTING}


@pytest.mark.parametrize("scheme", [pytest.param(HIER3, marks=pytest.mark.wide), HPZ], ids=lambda s: s.name)
def test_checkpointing_sends_no_more(scheme: Scheme) -> None:
    """Recomputation uses the backward's gather: with hpZ nothing crosses the node a second time."""
    for of_rank in on_ranks(8, count_all, scheme):
        for checkpointing, (sent, expected) in of_rank.items():
            assert sent == expected, checkpointing


def gathers_on_demand(make_model, wrap) -> list[str]:
    """Units, but the root's, whose gather was not under way when the second step needed them."""
    model = lowband.shard(make_model(), HPZ, lowband.Topology(INNER), wrap)
    engine = engine_of(model)
    gather, found = engine.passes.gather, []

    def watched(units, backward: bool, **options: bool) -> None:
        found.extend(unit.name for unit in units if unit.state is UnitState.SHARDED)
        gather(units, backward, **options)

    engine.passes.gather = watched
    for step in range(2):
        found.clear()
        model(inputs(step, dist.get_rank())).backward()
    return [name for name in found if not name.startswith("root")]


class MixedLayers(Tower):
    """Each layer has frozen and trainable parameters."""

    def __init__(self) -> None:
        super().__init__()
        for layer in self.layers:
            layer[0].requires_grad_(False)


class Shared(Tower):
    """A layer is used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.layers.append(self.layers[0])


@pytest.mark.parametrize(
    "make_model",
    [Tower, lambda: Tower(True, False), lambda: Tower(True, True), MixedLayers, Shared],
    ids=["plain", "checkpointed", "reentrant", "mixed", "shared"],
)
def test_every_gather_is_prefetched(make_model) -> None:
    """In forward and backward, after the root's: also the first of a backward, and of both units of a module
    that has frozen and trainable parameters."""
    assert on_ranks(4, gathers_on_demand, make_model, is_layer) == [[]] * 4


def most_gathered() -> tuple[int, int, int]:
    model = lowband.shard(Adapted(), HIER3, lowband.Topology(INNER), is_layer, compute_dtype=torch.float32)
    optimizer = sgd(model.parameters())
    for step in range(2):
        model(inputs(step, dist.get_rank())).backward()
        optimizer.step()
        optimizer.zero_grad()
    engine = engine_of(model)
    root, *layers = [unit.layout.numel * 4 for unit in engine.units]
    return engine.meter.peak["gathered"], root + 2 * sum(layers[:2]), engine.meter.now["gathered"]


def test_frozen_units_are_dropped_as_the_backward_goes() -> None:
    """Two layers and the root at a time, not the whole frozen model by the end of the backward."""
    for peak, bound, after in on_ranks(4, most_gathered):
        assert peak <= bound
        assert after == 0


def frozen_state() -> tuple[int, int]:
    model = lowband.shard(HalfFrozen(), HIER3, lowband.Topology(INNER), is_layer)
    model(inputs(0, dist.get_rank())).backward()
    frozen = sum(p.grad is not None for p in model.parameters() if not p.requires_grad)
    return frozen, sum(not u.requires_grad for u in engine_of(model).units)


def test_frozen_parameters_get_no_gradients() -> None:
    for with_grad, frozen_units in on_ranks(2, frozen_state):
        assert with_grad == 0
        assert frozen_units == 3


def evaluate_between_steps():
    """A forward without gradients leaves nothing gathered, and training goes on as if it had not been."""
    model = lowband.shard(Tower(), HPZ, lowband.Topology(INNER), is_layer, compute_dtype=torch.float32)
    optimizer = sgd(model.parameters())
    held = []
    for step in range(STEPS):
        with torch.no_grad():
            before = model(inputs(step, dist.get_rank())).item()
        held.append(engine_of(model).meter.now["gathered"])
        loss = model(inputs(step, dist.get_rank()))
        assert loss.item() == before
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        held.append(engine_of(model).meter.now["gathered"])
    return held, lowband.full_state_dict(model)


def test_evaluation_between_steps() -> None:
    held, weights = on_ranks(4, evaluate_between_steps)[0]
    assert set(held) == {0}
    expected = on_ranks(4, sharded, Tower, sgd, HPZ, is_layer)[0]
    assert all(torch.equal(weights[name], expected[name]) for name in expected)


def step_after_a_forward_without_backward() -> tuple[float, float]:
    """The loss after a step, with and without a forward that never saw its backward just before the step."""
    losses = []
    for with_lost_forward in (False, True):
        model = lowband.shard(Tower(), HPZ, lowband.Topology(INNER), is_layer, compute_dtype=torch.float32)
        optimizer = sgd(model.parameters())
        model(inputs(0, dist.get_rank())).backward()
        if with_lost_forward:
            model(inputs(1, dist.get_rank()))
        optimizer.step()
        losses.append(model(inputs(2, dist.get_rank())).item())
    return losses[0], losses[1]


def test_a_step_is_seen_by_what_is_still_gathered() -> None:
    for plain, after_lost_forward in on_ranks(4, step_after_a_forward_without_backward):
        assert plain == after_lost_forward


def accumulate(with_no_sync: bool):
    model = lowband.shard(Tower(), HIER3, lowband.Topology(INNER), is_layer, compute_dtype=torch.float32)
    rank = dist.get_rank()
    if with_no_sync:
        with lowband.no_sync(model):
            (model(inputs(0, rank)) / 2).backward()
        inside = [p.grad is None for p in model.parameters()]
        (model(inputs(1, rank)) / 2).backward()
        assert all(inside)
    else:  # also right, with more bytes: each backward is carried out to the optimizer's level
        for step in range(2):
            (model(inputs(step, rank)) / 2).backward()
    bytes_out = sum(s.bytes for s in engine_of(model).ledger.take() if s.collective == "boundary_reduce")
    return [p.grad.clone() for p in model.parameters()], bytes_out


def test_no_sync_saves_the_outer_reduction() -> None:
    (grads, with_), (expected, without) = (on_ranks(8, accumulate, flag)[0] for flag in (True, False))
    assert 2 * with_ == without > 0
    for a, b in zip(grads, expected, strict=True):
        assert torch.allclose(a, b, rtol=1e-5, atol=1e-7)


def nested() -> tuple[list[bool], list[bool]]:
    """Whether shards have gradients of a backward behind the inner of two contexts, and behind both."""
    model = lowband.shard(Tower(), HIER3, lowband.Topology(INNER), is_layer, compute_dtype=torch.float32)
    with lowband.no_sync(model):
        with lowband.no_sync(model):
            pass
        model(inputs(0, dist.get_rank())).backward()
        inside = [p.grad is not None for p in model.parameters()]
    model(inputs(1, dist.get_rank())).backward()
    return inside, [p.grad is not None for p in model.parameters()]


def test_no_sync_inside_of_no_sync() -> None:
    [(inside, behind)] = on_ranks(1, nested)
    assert not any(inside) and all(behind)


class Fuse(torch.autograd.Function):
    """Passes everything on; its backward raises once, where `Fuse.blows` is set."""

    blows = False

    @staticmethod
    def forward(ctx, x: torch.Tensor) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad: torch.Tensor) -> torch.Tensor:
        if Fuse.blows:
            Fuse.blows = False
            raise ArithmeticError("a broken backward")
        return grad


def gradient_bytes(set_to_none: bool) -> tuple[list[int], int, list[bool]]:
    """Counted bytes of gradients after each backward, what they are, and whether they stayed in place."""
    model = lowband.shard(Tower(), HIER3, lowband.Topology(INNER), is_layer, compute_dtype=torch.float32)
    optimizer, counted, stayed = sgd(model.parameters()), [], []
    for step in range(2):
        model(inputs(step, dist.get_rank())).backward()
        counted.append(engine_of(model).meter.now["grads"])
        places = [p.grad.data_ptr() for p in model.parameters()]
        model(inputs(step, dist.get_rank())).backward()  # without no_sync: added to what the parameters have
        counted.append(engine_of(model).meter.now["grads"])
        stayed += [p.grad.data_ptr() == place for p, place in zip(model.parameters(), places, strict=True)]
        optimizer.step()
        optimizer.zero_grad(set_to_none)
    return counted, sum(p.nbytes for p in model.parameters()), stayed


@pytest.mark.parametrize("set_to_none", [True, False])
def test_gradients_are_held_and_counted_once(set_to_none: bool) -> None:
    for counted, expected, stayed in on_ranks(4, gradient_bytes, set_to_none):
        assert counted == [expected] * 4
        assert all(stayed)


class FuseModule(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Fuse.apply(x)


class Fused(Tower):
    """The fuse is inside a wrapped layer: between its computation and its gradients."""

    def __init__(self, checkpointing: bool, reentrant: bool) -> None:
        super().__init__(checkpointing, reentrant)
        self.layers[1].insert(1, FuseModule())


def train_through_a_broken_backward(checkpointing: tuple[bool, bool], scheme: Scheme, breaks: bool):
    """Step 1 is given up: in one case because its backward raised half-way, after an accumulated one."""
    tower = Fused(*checkpointing)
    model = lowband.shard(tower, scheme, lowband.Topology(INNER), is_layer, compute_dtype=torch.float32)
    optimizer, meter = sgd(model.parameters()), engine_of(model).meter
    losses, held = [], []
    for step in range(3):
        with lowband.no_sync(model):
            model(inputs(10 + step, dist.get_rank())).backward()
        loss = model(inputs(step, dist.get_rank()))
        losses.append(loss.item())
        if step == 1 and breaks:
            Fuse.blows = True
            with pytest.raises(ArithmeticError, match="a broken backward"):
                loss.backward()
        else:
            loss.backward()
            if step != 1:
                optimizer.step()
        optimizer.zero_grad()
        held.append(meter.now["gathered"] if step != 1 else 0)
    return losses, held, lowband.full_state_dict(model)


SCHEMES = {scheme.name: scheme for scheme in (HIER3, HPZ)}


def train_without_and_with(checkpointing: tuple[bool, bool], scheme: Scheme):
    return [train_through_a_broken_backward(checkpointing, scheme, breaks) for breaks in (False, True)]


@pytest.mark.parametrize(
    ("scheme", "checkpointing"), pairwise(product(("hier3-exact", "hpz"), CHECKPOINTING), size=1)
)
def test_training_goes_on_after_a_broken_backward(scheme: str, checkpointing: tuple[bool, bool]) -> None:
    """As if the step had been made and thrown away with zero_grad."""
    whole, broken = zip(*on_ranks(4, train_without_and_with, checkpointing, SCHEMES[scheme]), strict=True)
    for (losses, held, _), (expected, _, _) in zip(broken, whole, strict=True):
        assert losses == expected
        assert set(held) == {0}
    assert all(torch.equal(broken[0][2][name], value) for name, value in whole[0][2].items())


def state_after_a_lost_forward() -> list[str]:
    model = lowband.shard(Tower(), HIER3, lowband.Topology(INNER), is_layer)
    model(inputs(0, dist.get_rank()))
    return list(lowband.full_state_dict(model))


def test_state_after_a_forward_without_backward() -> None:
    assert on_ranks(4, state_after_a_lost_forward)[0] == list(Tower().state_dict())


def sizes_in_a_hook() -> list[int]:
    """What a user's hook, registered before sharding, finds in its layer."""
    model, found = Tower(), []
    layer = next(module for module in model.modules() if is_layer(module))

    def note(module: nn.Module, _: object) -> None:
        found.append(sum(parameter.numel() for parameter in module.parameters()))

    layer.register_forward_pre_hook(note)
    whole = sum(parameter.numel() for parameter in layer.parameters())
    lowband.shard(model, HPZ, lowband.Topology(INNER), is_layer)
    model(inputs(0, dist.get_rank()))
    return [whole, *found]


def test_an_earlier_forward_hook_sees_the_whole_layer() -> None:
    for whole, seen in on_ranks(4, sizes_in_a_hook):
        assert seen == whole
