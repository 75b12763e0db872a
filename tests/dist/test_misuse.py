"""What the engine assumes and a program may break: right, or an error on every rank; never other numbers."""

import copy
import threading
import warnings
from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from brief import wait_briefly
from modules import Tower, inputs, is_layer
from torch import nn

import lowband
from lowband.errors import UserError
from lowband.run.on_ranks import on_ranks
from lowband.spec.scheme import Scheme

ZERO1 = Scheme(name="zero1", weights="self", grads="self", optim="world")
ZERO3 = Scheme(name="zero3", weights="world", grads="world", optim="world")
HSDP = Scheme(name="hsdp", weights="node", grads="node", optim="node")
INNER = {"node": 2}


class Choosing(Tower):
    """Runs the layers that `choice` names, and uses `unused` if asked to."""

    choice: tuple[int, ...] = (0, 1, 2)
    uses_all = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x) + self.shift
        for i in self.choice:
            x = x + self.layers[i](x) * self.scale
        if self.uses_all:
            x = x * self.unused.sum()
        return x.square().mean()


def sharded(scheme: Scheme = ZERO3, dtype: torch.dtype = torch.float32) -> nn.Module:
    return lowband.shard(Choosing(), scheme, lowband.Topology(INNER), is_layer, compute_dtype=dtype)


def sgd(parameters) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 2) -> list[float]:
    losses = []
    for step in range(steps):
        loss = model(inputs(step, dist.get_rank()))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def outcome(work: Callable[[], object]) -> tuple[str, str]:
    """Name and text of what `work` raises, "" where it raises nothing."""
    try:
        work()
    except BaseException as error:
        return type(error).__name__, str(error)
    return "", ""


def outcome_of_brief_waits(work: Callable[[], object]) -> tuple[str, str]:
    wait_briefly()
    return outcome(work)


# ---- the same on every rank: refused at once


def moved() -> None:
    model = sharded()
    model.to(torch.float64)
    train(model, sgd(model.parameters()))


def replaced() -> None:
    model = sharded()
    model.layers[1][0].weight = nn.Parameter(torch.zeros(3, 7))
    train(model, sgd(model.parameters()))


def frozen_after() -> None:
    model = sharded()
    model.layers[0].requires_grad_(False)
    train(model, sgd([p for p in model.parameters() if p.requires_grad]))


def first_frozen_after() -> None:
    model = sharded()
    model.scale.requires_grad_(False)
    model(inputs(0, dist.get_rank()))


def frozen_inside() -> None:
    model = sharded()
    model.layers[0].register_forward_hook(lambda *_: model.scale.requires_grad_(False))
    model(inputs(0, dist.get_rank()))


def unfrozen_inside() -> None:
    model = Choosing()
    model.scale.requires_grad_(False)
    lowband.shard(model, ZERO3, lowband.Topology(INNER), is_layer, compute_dtype=torch.float32)
    model.layers[0].register_forward_hook(lambda *_: model.scale.requires_grad_(True))
    said = []
    for _ in range(2):
        try:
            model(inputs(0, dist.get_rank()))
        except UserError as error:
            said.append(str(error))
    assert len(said) == 2
    raise UserError(said[1])


def norm_of_parameters() -> None:
    lowband.clip_grad_norm_(sharded().parameters(), 1.0)


def norm_of_what_is_around() -> None:
    lowband.clip_grad_norm_(torch.nn.Sequential(sharded()), 1.0)


def optimizer_before() -> None:
    model = Choosing()
    optimizer = sgd(model.parameters())
    lowband.shard(model, ZERO3, lowband.Topology(INNER), is_layer, compute_dtype=torch.float32)
    train(model, optimizer)


def groups_by_shape() -> None:
    model = sharded()
    decayed = [p for p in model.parameters() if len(p.shape) >= 2]
    others = [p for p in model.parameters() if len(p.shape) < 2]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    train(model, torch.optim.AdamW(groups))


def not_by_element() -> None:
    model = sharded()
    train(model, torch.optim.LBFGS(model.parameters()))


def clipped_by_torch() -> None:
    model = sharded()
    model(inputs(0, dist.get_rank())).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)


def scaled_by_torch() -> None:
    model = sharded()
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(model(inputs(0, dist.get_rank()))).backward()
    scaler.unscale_(sgd(model.parameters()))


def written_through_numpy() -> None:
    model = sharded(ZERO1, torch.bfloat16)
    model(inputs(0, dist.get_rank())).backward()
    for parameter in model.parameters():
        parameter.detach().numpy()[:] *= 2
    model(inputs(0, dist.get_rank()))


def stepped_in_between() -> None:
    model = sharded()
    optimizer = sgd(model.parameters())
    first, second = (model(inputs(i, dist.get_rank())) for i in range(2))
    first.backward()
    optimizer.step()
    second.backward()


def sharded_inside() -> None:
    model = Choosing()
    lowband.shard(model.layers[0], ZERO3, lowband.Topology(INNER), is_layer)
    lowband.shard(model, ZERO3, lowband.Topology(INNER), is_layer)


def tied_to_another() -> None:
    first, second = nn.Linear(5, 5), nn.Linear(5, 5)
    second.weight = first.weight
    for module in (first, second):
        lowband.shard(module, ZERO3, lowband.Topology(INNER), is_layer)


def copied() -> None:
    copy.deepcopy(sharded())


def never_synced() -> None:
    model = sharded()
    optimizer = sgd(model.parameters())
    with lowband.no_sync(model):
        model(inputs(0, dist.get_rank())).backward()
    optimizer.step()


def synced_too_early() -> None:
    model = sharded()
    optimizer = sgd(model.parameters())
    model(inputs(0, dist.get_rank())).backward()
    with lowband.no_sync(model):
        model(inputs(1, dist.get_rank())).backward()
    optimizer.step()


def never_synced_in_a_closure() -> None:
    model = sharded()

    def closure() -> torch.Tensor:
        with lowband.no_sync(model):
            loss = model(inputs(0, dist.get_rank()))
            loss.backward()
        return loss

    sgd(model.parameters()).step(closure)


def clipped_before_the_sync() -> None:
    model = sharded()
    with lowband.no_sync(model):
        model(inputs(0, dist.get_rank())).backward()
    lowband.clip_grad_norm_(model, 1.0)


def matrices_never_synced() -> None:
    model = sharded()
    matrices = lowband.Matrices(model)
    with lowband.no_sync(model):
        model(inputs(0, dist.get_rank())).backward()
    with matrices:
        pass


def sharded_in_inference_mode() -> None:
    with torch.inference_mode():
        sharded()


def saved_without_an_optimizer() -> None:
    lowband.Checkpointer("folder").save(0, sharded(), None)


class Recursive(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(5, 5), nn.Linear(5, 5)

    def forward(self, x: torch.Tensor, depth: int = 1) -> torch.Tensor:
        y = self.first(x)
        return self.last(self(y, depth - 1) if depth else y)


def unit_in_itself() -> None:
    model = lowband.shard(nn.Sequential(Recursive()), ZERO3, lowband.Topology(INNER), Recursive)
    model(torch.ones(2, 5))


def module_in_itself() -> None:
    lowband.shard(Recursive(), ZERO3, lowband.Topology(INNER), nn.Embedding)(torch.ones(2, 5))


def sent_as_integers() -> None:
    lowband.shard(Choosing(), ZERO3, lowband.Topology(INNER), is_layer, reduce_dtype=torch.int32)


def in_two_threads() -> None:
    """A second forward begins while the first one is under way."""
    model, inside, over = sharded(), threading.Event(), threading.Event()

    def wait(*_: object) -> None:
        if not inside.is_set():
            inside.set()
            over.wait(60)

    model.layers[0].register_forward_hook(wait)
    thread = threading.Thread(target=lambda: model(inputs(0, dist.get_rank())))
    thread.start()
    inside.wait()
    try:
        model(inputs(0, dist.get_rank()))
    finally:
        over.set()
        thread.join()


@pytest.mark.parametrize(
    ("misuse", "words"),
    [
        (moved, "parameters of 'root' were moved or cast after lowband.shard"),
        (replaced, "Linear.weight of 'layers.1': the parameter was replaced or removed after lowband.shard"),
        (frozen_after, "requires_grad of 'layers.0' was changed after lowband.shard"),
        (first_frozen_after, "requires_grad of 'root' was changed after lowband.shard"),
        (frozen_inside, "requires_grad of 'root' was changed after lowband.shard"),
        (
            unfrozen_inside,
            "was changed after lowband.shard (allowed: freezing before lowband.shard; torch.no_gra",
        ),
        (
            norm_of_parameters,
            "generator: is no module (allowed: the sharded module itself, not its parameters)",
        ),
        (norm_of_what_is_around, "Sequential: the module is not sharded (allowed: its '0', which is)"),
        (optimizer_before, "SGD: holds 'root: Choosing.scale' from before lowband.shard"),
        (groups_by_shape, "AdamW: param group 0 is empty"),
        (not_by_element, "LBFGS: needs whole parameters"),
        (clipped_by_torch, "allowed: lowband.clip_grad_norm_"),
        (scaled_by_torch, "of a shard's gradient covers this rank's part only"),
        (written_through_numpy, "were written through NumPy or from C++"),
        (stepped_in_between, "changed between this forward and its backward"),
        (sharded_inside, "'layers.0.0.weight' is already a shard"),
        (tied_to_another, "'weight' is shared with a module that is already sharded"),
        (copied, "a sharded module cannot be copied or pickled"),
        (
            never_synced,
            "SGD: 'scale' has gradients of backwards under no_sync, which this step would leave out",
        ),
        (synced_too_early, "SGD: 'scale' has gradients of backwards under no_sync"),
        (never_synced_in_a_closure, "SGD: 'scale' has gradients of backwards under no_sync"),
        (clipped_before_the_sync, "clip_grad_norm_: 'scale' has gradients of backwards under no_sync"),
        (matrices_never_synced, "Matrices: 'layers.0.0.weight' has gradients of backwards under no_sync"),
        (sharded_in_inference_mode, "Choosing: torch.inference_mode() makes shards that cannot be trained"),
        (saved_without_an_optimizer, "lowband.Checkpointer: no optimizer is given"),
        (unit_in_itself, "'0': calls itself in its forward, where its parameters are in use"),
        (module_in_itself, "'root': calls itself in its forward, where its parameters are in use"),
        (sent_as_integers, "lowband.shard: reduce_dtype is torch.int32 (allowed: torch.float32, torch."),
        (in_two_threads, "another thread runs a forward or backward of this module"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_refused_on_every_rank(misuse: Callable[[], None], words: str) -> None:
    for name, text in on_ranks(4, outcome, misuse):
        assert name == "UserError", text
        assert words in text
        assert "\n" not in text


# ---- other on some ranks: their messages must not meet


def layer_on_some_ranks() -> None:
    model = sharded()
    model.choice = (0, 1, 2) if dist.get_rank() % 2 else (0, 2)
    train(model, sgd(model.parameters()))


def another_order() -> None:
    model = sharded()
    model.choice = (0, 1, 2) if dist.get_rank() % 2 else (0, 2, 1)
    train(model, sgd(model.parameters()))


def layer_twice_on_some_ranks_at_last() -> None:
    """The layers' units are of one size, so that their messages would fit each other."""
    model = sharded()
    train(model, sgd(model.parameters()))
    model.choice = (0, 1, 2, 0) if dist.get_rank() == 3 else (0, 1, 2)
    train(model, sgd(model.parameters()))


def no_sync_on_some_ranks() -> None:
    model = sharded(HSDP)
    for step in range(2):
        with lowband.no_sync(model) if dist.get_rank() == 1 else nullcontext():
            model(inputs(step, dist.get_rank())).backward()


def step_on_some_ranks() -> None:
    model = sharded(ZERO1, torch.bfloat16)
    optimizer = sgd(model.parameters())
    for step in range(2):
        model(inputs(step, dist.get_rank())).backward()
        if dist.get_rank() != 2:
            optimizer.step()


def backward_on_some_ranks() -> None:
    model = sharded()
    loss = model(inputs(0, dist.get_rank()))
    if dist.get_rank() != 0:
        loss.backward()
    train(model, sgd(model.parameters()))


@pytest.mark.parametrize(
    "misuse",
    [
        layer_on_some_ranks,
        another_order,
        layer_twice_on_some_ranks_at_last,
        no_sync_on_some_ranks,
        step_on_some_ranks,
        backward_on_some_ranks,
    ],
    ids=lambda value: value.__name__,
)
def test_ranks_that_part_ways_fail_by_their_timeout(misuse: Callable[[], None]) -> None:
    results = on_ranks(4, outcome_of_brief_waits, misuse)
    for name, text in results:
        assert name == "PeerLost", (name, text)
        assert "\n" not in text
    assert any("modules in the same order" in text for _, text in results)


def orders_of_steps(differs_at: int) -> list[str]:
    """What comparing the order says after each of four steps, as it would where messages carry no tags."""
    topology, said = lowband.Topology(INNER), []
    for step in range(4):
        other = dist.get_rank() == 2 and step == differs_at
        topology.along("data").order.note(f"layer {7 if other else step}")
        dist.barrier()
        said.append(outcome(topology.along("data").order.compare)[1])
    return said


def test_order_is_compared_through_the_store() -> None:
    assert on_ranks(4, orders_of_steps, -1) == [[""] * 4] * 4
    by_rank = on_ranks(4, orders_of_steps, 2)
    assert all(said[:2] == ["", ""] for said in by_rank)
    assert any("reached layer 7" in said[2] or "the other to layer 7" in said[2] for said in by_rank)


# ---- right


def losses(choice: tuple[int, ...], uses_all: tuple[bool, ...], is_sharded: bool) -> list[float]:
    """Means over four ranks; `uses_all` by rank."""
    model, ranks = Choosing(), [dist.get_rank()] if is_sharded else range(4)
    if is_sharded:
        lowband.shard(model, HSDP, lowband.Topology(INNER), is_layer, compute_dtype=torch.float32)
    model.choice, optimizer, found = choice, sgd(model.parameters()), []
    for step in range(3):
        total = 0.0
        for rank in ranks:
            model.uses_all = uses_all[rank]
            loss = model(inputs(step, rank)) / len(ranks)
            loss.backward()
            total += loss.item()
        optimizer.step()
        optimizer.zero_grad()
        found.append(total)
    return found


@pytest.mark.parametrize(
    ("choice", "uses_all"),
    [((0, 1, 1, 0, 2), (False,) * 4), ((0, 1, 2), (True, False, False, True)), ((2, 0), (True,) * 4)],
    ids=["layers used twice", "a gradient on some ranks only", "a layer that no rank uses"],
)
def test_right(choice: tuple[int, ...], uses_all: tuple[bool, ...]) -> None:
    [expected] = on_ranks(1, losses, choice, uses_all, False)
    by_rank = on_ranks(4, losses, choice, uses_all, True, peer_timeout_s=60)
    means = [sum(step) / 4 for step in zip(*by_rank, strict=True)]
    assert means == pytest.approx(expected, rel=1e-5)


def zeroed() -> float:
    """The loss after every weight was set to zero in place, where a 16-bit copy of the weights is kept."""
    model = sharded(ZERO1, torch.bfloat16)
    model(inputs(0, 0))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    return model(inputs(0, 0)).item()


def test_weights_written_in_place_are_seen() -> None:
    shift = torch.linspace(0, 1, 7)  # all that is left of the tower
    assert on_ranks(4, zeroed) == [pytest.approx(shift.square().mean().item(), rel=1e-6)] * 4


def decayed_by_shape() -> list[str]:
    """Names of the parameters that were matrices, found as docs/library.md says."""
    model = sharded()
    matrices = {name: p for name, p in model.named_parameters() if len(p.shard_of.shape) >= 2}
    others = [p for name, p in model.named_parameters() if name not in matrices]
    groups = [{"params": [*matrices.values()], "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    train(model, torch.optim.AdamW(groups))
    return list(matrices)


def test_groups_by_whole_shape() -> None:
    expected = [name for name, p in Choosing().named_parameters() if p.ndim >= 2]
    assert on_ranks(4, decayed_by_shape) == [expected] * 4


def beside_the_shards() -> list[list[str]]:
    """What is said of three steps of an optimizer with a head around the sharded module, and without."""
    found = []
    for head in (nn.Linear(1, 1), nn.Identity()):
        model = sharded()
        optimizer = sgd([*model.parameters(), *head.parameters()])
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            for step in range(3):
                head(model(inputs(step, dist.get_rank())).view(1, 1)).sum().backward()
                optimizer.step()
        found.append([str(each.message) for each in told])
    return found


def test_parameters_beside_the_shards_are_warned_of_once() -> None:
    (first, quiet), *others = on_ranks(2, beside_the_shards)
    assert quiet == [] and others == [[[], []]]
    assert [text[:87] for text in first] == [
        "SGD has 2 parameters beside the shards, the first of shape [1, 1], whose gradients lowb"
    ]
