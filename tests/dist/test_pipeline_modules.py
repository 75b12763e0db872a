"""What modules of a pipeline may do: draw random numbers, be computed again, share, freeze, return tuples."""

import re
from functools import partial
from typing import Any

import pytest
import torch
from staged import CLIP, Layer, Trained, alone, batches, chain, loss_of, on_axes, plain, train, whole
from torch import nn

import lowband
from lowband.engine.api import engine_of
from lowband.engine.parallel.deferred import Deferred, Deferring
from lowband.engine.parallel.plan import lists_of
from lowband.run.on_ranks import on_ranks
from lowband.spec.axes import Axes
from lowband.spec.mesh import Levels
from lowband.spec.schedule import Action, walk
from lowband.spec.schedules import lists
from tests.checkout import CONFIG, ROOT
from tests.refused import refusal

ZERO3 = CONFIG.scheme("zero3")
ONE = Levels.fit({}, 1)


def same_bits(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> bool:
    return found.keys() == expected.keys() and all(torch.equal(found[k], expected[k]) for k in expected)


# ---- dropout and activation checkpointing


def random_on_ranks(schedule: str, recomputes: bool) -> list[torch.Tensor]:
    """Gradients of this rank's stages, and whether gradients of its layers were put off."""
    topology = lowband.Topology({}, Axes(pipeline=2))
    modules = chain(4, dropout=0.3, recomputes=recomputes)
    pipe = lowband.Pipeline(modules, loss_of, ZERO3, topology, 4, schedule, compute_dtype=torch.float32)
    torch.manual_seed(10 + topology.rank)
    pipe.step(batches(0, 0, 4))
    lowband.clip_grad_norm_(pipe, CLIP)
    return {
        name: p.grad.as_subclass(torch.Tensor)[: p.shard_of.stop].view(p.shard_of.shape)
        for name, p in pipe.named_parameters()
    }


def random_alone(schedule: str) -> dict[str, torch.Tensor]:
    """Each action in turn, with the random state of its rank: without checkpointing, in plain torch."""
    modules = chain(4, dropout=0.3)
    model = nn.Sequential(*modules)
    of_ranks = lists(schedule, 2, 4, 2 if schedule.endswith("v") else 1)
    stages = 1 + max(action.stage for of_rank in of_ranks for action in of_rank)
    sizes = [len(modules) // stages + (stage < len(modules) % stages) for stage in range(stages)]
    parts = list(torch.arange(len(modules)).split(sizes))
    states = [torch.Generator().manual_seed(10 + rank).get_state() for rank in range(2)]
    inputs, outputs = {}, {}
    data = batches(0, 0, 4)
    for rank, (kind, stage, i), _ in walk(of_ranks):
        if kind == "forward":
            torch.set_rng_state(states[rank])
            x = data[i][0] if stage == 0 else outputs[stage - 1, i].detach().requires_grad_()
            inputs[stage, i] = x
            for place in parts[stage]:
                x = modules[place](x)
            outputs[stage, i] = loss_of(x, data[i][1]) if stage == stages - 1 else x
            states[rank] = torch.get_rng_state()
        elif kind in ("backward", "input"):
            grad = None if stage == stages - 1 else inputs[stage + 1, i].grad
            outputs[stage, i].backward(grad)
    norm = sum(p.grad.double().square().sum() for p in model.parameters()).sqrt().item()
    return {name: p.grad * (CLIP / norm) for name, p in model.named_parameters()}


@pytest.mark.parametrize(
    ("schedule", "recomputes"),
    [
        ("1f1b", True),
        ("zb-v", True),
        pytest.param("1f1b", False, marks=pytest.mark.wide),
        pytest.param("zb-v", False, marks=pytest.mark.wide),
        pytest.param("zb-h1", True, marks=pytest.mark.wide),
        pytest.param("dualpipe-v", True, marks=pytest.mark.wide),
    ],
)
def test_dropout_draws_as_the_ranks_do_and_checkpointing_repeats_it(schedule: str, recomputes: bool) -> None:
    found = on_ranks(2, random_on_ranks, schedule, recomputes)
    [expected] = on_ranks(1, random_alone, schedule)
    assert same_bits({**found[0], **found[1]}, expected)


# ---- the parts of a split backward


def parts_of_a_backward() -> tuple[list[str], list[str], bool]:
    """Names of parameters with gradients after each part; whether the whole is a plain backward's."""
    torch.manual_seed(0)
    layer = Layer()
    layer.up.bias.requires_grad_(False)
    names = dict(layer.named_parameters())
    mine = {id(p) for p in layer.parameters()}
    x = torch.randn(3, 8)
    layer(x).square().sum().backward()
    expected = {name: p.grad for name, p in names.items()}
    layer.zero_grad()
    deferred, deferring = Deferred(lambda tensor: id(tensor) in mine), Deferring(layer.modules())
    with deferring.into(deferred):
        loss = layer(x).square().sum()
    loss.backward()
    first = [name for name, p in names.items() if p.grad is not None]
    deferred.run()
    found = {name: p.grad for name, p in names.items()}
    both = [name for name in names if found[name] is not None]
    same = all(torch.equal(found[name], expected[name]) for name in both)
    layer.zero_grad()
    with torch.autocast("cpu", torch.bfloat16), deferring.into(deferred):
        layer(x).sum().backward()  # in one part
    return first, both, same and layer.down.weight.grad is not None


def test_the_input_part_leaves_linear_weights_to_the_other_part() -> None:
    [(first, both, same)] = on_ranks(1, parts_of_a_backward)
    # a bias that does not train belongs to a product that is not put off
    assert first == ["scale", "norm.weight", "norm.bias", "up.weight"]
    assert both == [*first, "down.weight"]
    assert same


# ---- what else modules do


class Pair(nn.Module):
    """Hands on a mask, which has no gradient, and a second stream, which has one."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = Layer()

    def forward(self, x: torch.Tensor, mask: torch.Tensor, other: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return self.layer(x) * mask, mask, other + x


class Fork(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 8)

    def forward(self, tokens: torch.Tensor) -> tuple[torch.Tensor, ...]:
        x = self.embed(tokens)
        return x, (tokens > 3).unsqueeze(-1), x * 0.5


class Join(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(8, 11)

    def forward(self, x: torch.Tensor, _mask: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        return self.head(x + other)


class Chained(nn.Sequential):
    def forward(self, value):
        for module in self:
            value = module(*value) if isinstance(value, tuple) else module(value)
        return value


def tuples() -> list[nn.Module]:
    torch.manual_seed(2)
    return [Fork(), Pair(), Pair(), Join()]


class Guided(nn.Module):
    """Moves what it is given along gradients of an energy, of which one trains it: its forward takes them."""

    def __init__(self) -> None:
        super().__init__()
        self.energy, self.layer = nn.Linear(8, 3), Layer()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        energy = torch.tanh(self.energy(x)).sum()
        of_x, of_weight = torch.autograd.grad(energy, [x, self.energy.weight], retain_graph=True)
        [trained] = torch.autograd.grad(energy, x, create_graph=True)
        return self.layer(x - 0.1 * of_x - 0.1 * trained - 0.1 * of_weight.sum(0))


def guided() -> list[nn.Module]:
    modules = chain(3)
    modules[2:2] = [Guided(), Guided()]
    return modules


class InPlace(nn.Module):
    """Begins by changing what it is given, as nn.ReLU(inplace=True) does."""

    def __init__(self) -> None:
        super().__init__()
        self.act, self.up = nn.LeakyReLU(0.1, inplace=True), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.up(self.act(x))


def in_place() -> list[nn.Module]:
    embed, layer, head = chain(1)
    return [embed, InPlace(), nn.LeakyReLU(0.1, inplace=True), layer, InPlace(), head]


def half_frozen() -> list[nn.Module]:
    """No gradient goes back to the first rank: its stage does not train."""
    modules = chain(4)
    for module in modules[:3]:
        module.requires_grad_(False)
    return modules


def tied() -> list[nn.Module]:
    modules = chain(4)
    modules[-1] = nn.Linear(8, 11, bias=False)
    modules[-1].weight = modules[0].weight
    return modules


class WithEmbedding(nn.Module):
    """A head that has the embedding inside, and calls it, or takes its weight."""

    def __init__(self, embed: nn.Embedding, calls: bool) -> None:
        super().__init__()
        self.embed, self.calls = embed, calls

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        every = torch.arange(self.embed.num_embeddings)
        return nn.functional.linear(x, self.embed(every) if self.calls else self.embed.weight)


def called_inside() -> list[nn.Module]:
    modules = chain(4)
    return [*modules[:-1], WithEmbedding(modules[0], calls=True)]


def taken_inside() -> list[nn.Module]:
    modules = chain(4)
    return [*modules[:-1], WithEmbedding(modules[0], calls=False)]


@pytest.mark.parametrize(
    ("modules", "schedule", "layers"),
    [
        (called_inside, "zb-v", [1, 2, 2, 1]),
        (taken_inside, "zb-v", [1, 2, 2, 1]),
        (tuples, "zb-h1", [1, 3]),
        (half_frozen, "1f1b", None),
        (tied, "zb-v", [1, 2, 2, 1]),
        (guided, "zb-h1", None),
        (in_place, "zb-v", [1, 1, 2, 2]),
    ],
    ids=["called inside", "taken inside", "tuples", "half frozen", "tied", "gradients inside", "in place"],
)
def test_other_modules(modules, schedule: str, layers: list[int] | None) -> None:
    work = partial(on_axes, schedule=schedule, layers=layers)
    found = on_ranks(2, work, {}, 2, ZERO3, 3, modules)
    [(losses, norms, state, _)] = on_ranks(1, lambda: plain(Chained(*modules()), 3))
    [there] = [one.losses for one in found if one.losses[0]]
    if modules in (tied, called_inside, taken_inside):
        # Of the shared gradient two stages sum a part each: another order of sums.
        torch.testing.assert_close(torch.tensor(there), torch.tensor(losses), rtol=1e-6, atol=0)
    else:
        assert there == losses
    assert found[0].norms == found[1].norms == pytest.approx(norms, rel=1e-6)
    got = whole(found)
    assert got.keys() == state.keys()
    for key, value in state.items():
        torch.testing.assert_close(got[key], value, rtol=1e-6, atol=1e-6)


def evaluated_between_steps() -> tuple[list[float], bool, dict[str, torch.Tensor]]:
    """Losses without gradients of other shapes, on the rank that has them; whether weights are dropped."""
    topology = lowband.Topology({}, Axes(pipeline=2))
    pipe = lowband.Pipeline(chain(4), loss_of, ZERO3, topology, 3, "zb-v", compute_dtype=torch.float32)
    longer = [(torch.cat([x, x], 1), torch.cat([y, y], 1)) for x, y in batches(9, 0, 3)]
    with torch.no_grad():
        losses = [float(loss) for loss in pipe.step(longer)]
    are_shards = all(p.ndim and hasattr(p, "shard_of") for p in pipe.parameters())
    with lowband.no_sync(pipe):
        pipe.step(batches(0, 0, 3))
    assert all(p.grad is None for p in pipe.parameters())
    pipe.step(batches(1, 0, 3))
    with torch.no_grad():
        pipe.step(longer)
    optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
    optimizer.step()
    return losses, are_shards, lowband.full_state_dict(pipe)


def evaluated_alone() -> tuple[list[float], dict[str, torch.Tensor]]:
    model = nn.Sequential(*chain(4))
    longer = [(torch.cat([x, x], 1), torch.cat([y, y], 1)) for x, y in batches(9, 0, 3)]
    with torch.no_grad():
        losses = [loss_of(model(x), y).item() for x, y in longer]
    for step in range(2):
        for x, y in batches(step, 0, 3):
            loss_of(model(x), y).backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    return losses, model.state_dict()


def test_evaluation_and_accumulation_over_steps() -> None:
    found = on_ranks(2, evaluated_between_steps)
    [(losses, state)] = on_ranks(1, evaluated_alone)
    assert [one[0] for one in found] == [losses, []]  # a V's last stage is on the first rank
    assert all(one[1] for one in found)
    for key, value in state.items():
        torch.testing.assert_close({**found[0][2], **found[1][2]}[key], value, rtol=1e-6, atol=1e-6)


# ---- cut along tensor, too


def on_three_axes(schedule: str) -> Trained:
    topology = lowband.Topology({"node": 2}, Axes(tensor=2, pipeline=2))
    modules = nn.ModuleList(chain(4, dtype=torch.float64))
    plan = {"*.up": lowband.Column(), "*.down": lowband.Row()}
    cut = lowband.parallelize(modules, plan, topology)
    pipe = lowband.Pipeline(cut, loss_of, ZERO3, topology, 3, schedule, compute_dtype=torch.float64)
    return train(pipe, topology.along("data").place, 3)


@pytest.mark.parametrize(("schedule", "data"), [("zb-v", 1), pytest.param("1f1b", 2, marks=pytest.mark.wide)])
def test_stages_that_are_cut_along_tensor(schedule: str, data: int) -> None:
    found = on_ranks(4 * data, on_three_axes, schedule)
    modules = partial(chain, 4, dtype=torch.float64)
    [expected] = on_ranks(1, alone, modules, 3, Levels.fit({}, data))
    last = [one for one in found if one.losses[0]]
    assert len(last) == 2 * data  # every tensor rank has the loss
    for found_losses, losses in zip(last[0].losses, expected.losses[::data], strict=True):
        assert found_losses == pytest.approx(losses, rel=1e-6)
    assert {tuple(one.norms) for one in found} == {tuple(found[0].norms)}
    assert found[0].norms == pytest.approx(expected.norms, rel=1e-6)
    state = whole(found)
    assert state.keys() == expected.state.keys()
    for key, value in expected.state.items():
        torch.testing.assert_close(state[key], value.float(), rtol=1e-5, atol=1e-6)


def run_example(text: str) -> bool:
    def mean_loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return loss_of(output, target) / 16

    names = {"torch": torch, "lowband": lowband, "modules": chain(8), "loss": mean_loss}
    before = dict(nn.Sequential(*chain(8)).state_dict())
    names["steps"] = [batches(step, 0, 16) for step in range(2)]
    exec(text, names)
    after = lowband.full_state_dict(names["pipe"])
    return len(names["losses"]) == 16 * names["pipe"].has_loss and not any(
        torch.equal(before[name], after[name]) for name in after
    )


def test_the_example_of_the_page_runs() -> None:
    page = ROOT / "docs" / "library.md"
    found = re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)
    [example] = [text for text in found if "lowband.Pipeline" in text]
    assert on_ranks(4, run_example, example) == [True] * 4


# ---- against the engine without a pipeline


def without_pipeline(scheme: str, inner: dict[str, int], micro_batches: int) -> dict[str, torch.Tensor]:
    """Breadth-first on the data ranks alone: the same units, gathered and reduced over the same wires."""
    topology, model = lowband.Topology(inner), nn.Sequential(*chain(2))
    units = set(model)
    lowband.shard(model, scheme, topology, lambda m: m in units, compute_dtype=torch.bfloat16)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(4):
        data = batches(step, topology.rank, micro_batches)
        lowband.accumulate(model, data, lambda pair: loss_of(model(pair[0]), pair[1]))
        optimizer.step()
        optimizer.zero_grad()
    return lowband.full_state_dict(model)


def with_pipeline(scheme: str, inner: dict[str, int], micro_batches: int) -> dict[str, torch.Tensor]:
    """From the meta device, where no rank makes the whole model."""
    topology = lowband.Topology(inner, Axes(pipeline=2))
    data = topology.along("data").place
    pipe = lowband.Pipeline(chain(2), loss_of, scheme, topology, micro_batches)
    optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
    for step in range(4):
        pipe.step(batches(step, data, micro_batches))
        optimizer.step()
        optimizer.zero_grad()
    return lowband.full_state_dict(pipe)


@pytest.mark.parametrize(
    ("scheme", "data"),
    [
        ("zeropp", 2),
        ("local-sgd", 2),
        pytest.param("hier3", 4, marks=pytest.mark.wide),
        pytest.param("zeropp", 4, marks=pytest.mark.wide),
        pytest.param("diloco", 4, marks=pytest.mark.wide),
    ],
)
def test_bits_are_those_of_the_engine_without_a_pipeline(scheme: str, data: int) -> None:
    """In bf16, with quantized wires and with replicas."""
    inner = {"package": 1, "node": data // 2}
    [expected, *_] = on_ranks(data, without_pipeline, scheme, inner, 3)
    found = on_ranks(2 * data, with_pipeline, scheme, inner, 3)
    assert same_bits({key: value for one in found for key, value in one.items()}, expected)


def meta_and_lists() -> dict[str, torch.Tensor]:
    """A list of the user's own, uneven stages, values made on each rank of what it holds."""
    topology = lowband.Topology({}, Axes(pipeline=2))
    with torch.device("meta"):
        modules = chain(4)
    own = [[Action(kind, rank, i) for i in range(2) for kind in ("forward", "backward")] for rank in range(2)]
    pipe = lowband.Pipeline(
        modules, loss_of, ZERO3, topology, 2, own, layers=[4, 2], compute_dtype=torch.float32, init=init
    )
    peak = engine_of(pipe).meter.peak
    assert peak["start"] < sum(p.numel() for m in modules for p in m.parameters()) * 4 or topology.rank
    return train(pipe, 0, 2)


def init(name: str, tensor: torch.Tensor) -> None:
    tensor.normal_(0, 0.1) if tensor.ndim > 1 else tensor.fill_(0.5)


def from_values(values: dict[str, torch.Tensor]) -> list[nn.Module]:
    model = nn.Sequential(*chain(4))
    model.load_state_dict(values)
    return list(model)


def initial() -> dict[str, torch.Tensor]:
    with torch.device("meta"):
        model = nn.Sequential(*chain(4))
    lowband.shard(model, ZERO3, lowband.Topology({}), Layer, init=init)
    return lowband.full_state_dict(model)


def test_own_lists_and_modules_without_values() -> None:
    found = on_ranks(2, meta_and_lists)
    [values] = on_ranks(1, initial)
    [expected] = on_ranks(1, alone, partial(from_values, values), 2, ONE)
    assert found[1].losses == expected.losses
    assert same_bits(whole(found), expected.state)


@pytest.mark.parametrize(
    "lists", [[[("forward", 0, 0), ("backward", 0, 0)]], [Action("forward", 0, 0), Action("backward", 0, 0)]]
)
def test_lists_of_what_is_no_action_are_refused(lists: Any) -> None:
    assert refusal(lists_of, lists, 1, 1, None) == (
        "a pipeline: a schedule has what is no action (allowed: lists of "
        "lowband.spec.schedule.Action, by rank)"
    )


def test_losses_are_in_the_order_of_micro_batches() -> None:
    """Whatever the order in which they are computed."""
    one_by_one = [Action(kind, 0, i) for i in (1, 0) for kind in ("forward", "backward")]
    assert on_ranks(1, losses_of, [one_by_one]) == on_ranks(1, losses_of, "1f1b")


def losses_of(schedule: Any) -> list[float]:
    topology = lowband.Topology({}, Axes(pipeline=1))
    pipe = lowband.Pipeline(chain(2), loss_of, ZERO3, topology, 2, schedule, compute_dtype=torch.float32)
    return [float(loss) for loss in pipe.step(batches(0, 0, 2))]
