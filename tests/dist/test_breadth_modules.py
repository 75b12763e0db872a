"""Breadth-first accumulation of any module that is a chain of its units, and the refusal of others."""

import re
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from modules import HIER3, HPZ, INNER, Adapted, Tower, inputs, is_layer, sgd
from test_recompute import BATCH, MODEL, NORM_STATISTICS
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import lowband
from lowband.cost.activations import kept_bytes_per_token
from lowband.engine.api import engine_of
from lowband.engine.coroutine import Coroutine
from lowband.errors import UserError
from lowband.model.gpt import GPT, Block
from lowband.run.on_ranks import on_ranks
from lowband.spec.scheme import Scheme

RANKS, STEPS, MICRO_BATCHES = 4, 3, 3


class Chain(nn.Module):
    """Layers in a row, of odd sizes; an unused parameter; a head that shares nothing."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first = nn.Linear(5, 7)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(7, n), nn.Tanh(), nn.Linear(n, 7)) for n in (3, 40, 5)
        )
        self.head = nn.Linear(7, 3)
        self.unused = nn.Parameter(torch.ones(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = self.through(layer, x)
        return self.head(x).square().mean()

    def through(self, layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return layer(x)


class FrozenStart(Chain):
    """Of the embedding and a layer nothing trains, of another one only a part."""

    def __init__(self) -> None:
        super().__init__()
        for parameter in (*self.first.parameters(), *self.layers[0].parameters(), self.layers[1][0].bias):
            parameter.requires_grad_(False)


class FrozenEnd(Chain):
    def __init__(self) -> None:
        super().__init__()
        self.layers[2].requires_grad_(False)


class Shared(Chain):
    """A layer is used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.layers.append(self.layers[1])


class Earlier(Chain):
    """The head also uses the first layer's output, and the layers return tuples."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        outputs = [self.first(x)]
        for layer in self.layers:
            outputs.append(layer(outputs[-1]))
        return self.head(outputs[-1] + outputs[1]).square().mean()


class Recomputed(Chain):
    reentrant = False

    def through(self, layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(layer, x, use_reentrant=self.reentrant)


def micro(step: int, i: int, rank: int) -> torch.Tensor:
    return inputs(10 * step + i, rank)


def sharded(make: Callable[[], nn.Module], scheme: Scheme = HPZ) -> nn.Module:
    return lowband.shard(make(), scheme, lowband.Topology(INNER), is_layer, compute_dtype=torch.float32)


def accumulated(model: nn.Module, step: int) -> list[torch.Tensor]:
    parts = [micro(step, i, dist.get_rank()) for i in range(MICRO_BATCHES)]
    return lowband.accumulate(model, parts, lambda x: model(x) / MICRO_BATCHES)


def train(model: nn.Module, between: Callable[[nn.Module], object] = lambda model: None) -> None:
    optimizer = sgd([p for p in model.parameters() if p.requires_grad])
    for step in range(STEPS):
        accumulated(model, step)
        optimizer.step()
        optimizer.zero_grad()
        between(model)


def weights(model: nn.Module) -> dict[str, torch.Tensor]:
    return lowband.full_state_dict(model)


def train_all(makes) -> list[dict[str, torch.Tensor]]:
    found = []
    for make in makes:
        model = sharded(make)
        train(model)
        assert not any(engine_of(model).meter.now[kind] for kind in ("gathered", "sums"))
        found.append(weights(model))
    return found


def single(makes) -> list[dict[str, torch.Tensor]]:
    """The mean over all ranks' micro-batches, in one process."""
    found = []
    for make in makes:
        model = make()
        optimizer = sgd([p for p in model.parameters() if p.requires_grad])
        for step in range(STEPS):
            for i in range(MICRO_BATCHES):
                for rank in range(RANKS):
                    (model(micro(step, i, rank)) / (MICRO_BATCHES * RANKS)).backward()
            optimizer.step()
            optimizer.zero_grad()
        found.append({name: value.detach() for name, value in model.state_dict().items()})
    return found


CHAINS = (Chain, FrozenStart, FrozenEnd, Shared, Earlier, Recomputed)


def test_chains_train_as_in_one_process() -> None:
    """Up to the order of sums over ranks."""
    [expected] = on_ranks(1, single, CHAINS)
    for make, got, of_make in zip(CHAINS, on_ranks(RANKS, train_all, CHAINS)[0], expected, strict=True):
        for name, value in of_make.items():
            if name != "unused":  # it has no gradient on one device and a zero one here
                assert torch.allclose(got[name], value, rtol=1e-5, atol=2e-5), (make.__name__, name)


# ---- with everything else that a program does


class Bomb(torch.autograd.Function):
    """Passes through; raises in forward or backward when it is armed."""

    armed = ""

    @staticmethod
    def forward(ctx, x):
        Bomb.blow("forward")
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        Bomb.blow("backward")
        return grad

    @staticmethod
    def blow(where: str) -> None:
        if Bomb.armed == where:
            raise ArithmeticError(where)


class Mined(Chain):
    """Raises inside of its second layer, if `Bomb` is armed."""

    def __init__(self) -> None:
        super().__init__()
        self.layers[1][1].register_forward_hook(lambda _module, _args, out: Bomb.apply(out))


def interrupted(model: nn.Module) -> None:
    """In every phase; the gradients of the failed calls are cleared, as after any failed backward."""
    before = threading.active_count()
    for armed in ("forward", "backward"):
        Bomb.armed = armed
        with pytest.raises(ArithmeticError):
            accumulated(model, 7)
        Bomb.armed = ""
    with pytest.raises(KeyError):
        lowband.accumulate(model, [0, 1], lambda i: model(micro(7, i, 0)) / {0: 1.0}[i])
    assert threading.active_count() == before
    assert not any(engine_of(model).meter.now[kind] for kind in ("gathered", "sums"))
    model.zero_grad()


def evaluated(model: nn.Module) -> None:
    with torch.no_grad():
        model(micro(8, 0, dist.get_rank()))


def in_depth_too(model: nn.Module) -> None:
    """A depth-first pass, whose gradients are cleared."""
    model(micro(9, 0, dist.get_rank())).backward()
    model.zero_grad()


def with_others() -> list[bool]:
    """Whether training stays the same bit by bit with each of these between its steps."""
    expected = sharded(Mined)
    train(expected)
    same = []
    for between in (interrupted, evaluated, in_depth_too):
        model = sharded(Mined)
        train(model, between)
        same.append(equal(weights(model), weights(expected)))
    model, other = (sharded(Mined) for _ in range(2))  # two modules, on topologies of their own
    train(model, lambda _: accumulated(other, 5))
    other.zero_grad()
    return [*same, equal(weights(model), weights(expected))]


def equal(got: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> bool:
    return list(got) == list(expected) and all(torch.equal(got[name], expected[name]) for name in expected)


def test_nothing_between_steps_changes_the_training() -> None:
    assert on_ranks(RANKS, with_others)[0] == [True] * 4


def on_one_topology() -> bool:
    """Three modules; the loss of one also uses another, frozen for it, that is no chain."""
    topology = lowband.Topology(INNER)
    models = [
        lowband.shard(make(), HIER3, topology, is_layer, compute_dtype=torch.float32)
        for make in (Chain, Chain, Tower)
    ]
    alone, model, teacher = models
    accumulated(alone, 0)

    def loss_of(x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            teacher(x)
        return model(x) / MICRO_BATCHES

    parts = [micro(0, i, dist.get_rank()) for i in range(MICRO_BATCHES)]
    lowband.accumulate(model, parts, loss_of)
    pairs = zip(alone.parameters(), model.parameters(), strict=True)
    return all(torch.equal(a.grad, b.grad) for a, b in pairs)


def in_two_calls() -> bool:
    """Under no_sync, then at the boundary: the sum of both calls, as in one call up to the order of sums."""
    model, whole = sharded(Chain), sharded(Chain)
    for each, groups in ((model, ((0, 1), (2,))), (whole, ((0, 1, 2),))):
        for group in groups:
            parts = [micro(0, i, dist.get_rank()) for i in group]
            engine_of(each).sync = group[-1] == 2
            lowband.accumulate(each, parts, each)
    pairs = zip(model.parameters(), whole.parameters(), strict=True)
    return all(torch.allclose(a.grad, b.grad, rtol=1e-5, atol=1e-7) for a, b in pairs)


def resumed(folder: Path) -> bool:
    """A checkpoint between two steps: the second gives the same weights."""
    found = []
    for is_resumed in (False, True):
        model = sharded(Chain)
        optimizer = torch.optim.AdamW(model.parameters())
        checkpointer = lowband.Checkpointer(folder)
        if is_resumed:
            checkpointer.load_newest(model, optimizer)
        for step in range(1 if is_resumed else 0, 2):
            accumulated(model, step)
            optimizer.step()
            optimizer.zero_grad()
            if step == 0:
                checkpointer.save(1, model, optimizer, {})
                checkpointer.wait()
        found.append(weights(model))
    return equal(*found)


def all_of(*works: Callable[[], bool]) -> list[bool]:
    return [work() for work in works]


def test_with_other_modules_calls_and_checkpoints(tmp_path: Path) -> None:
    works = (on_one_topology, in_two_calls, lambda: resumed(tmp_path))
    assert on_ranks(RANKS, all_of, *works)[0] == [True] * 3


# ---- refused


class Reentrant(Recomputed):
    reentrant = True


class Nested(Chain):
    """A unit inside of another."""

    def __init__(self) -> None:
        super().__init__()
        self.layers[1].append(nn.Sequential(nn.Linear(7, 7)))


class Choosing(Chain):
    """Micro-batches take different layers."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        skipped = int(x[0, 0] > 0)
        return self.layers[2](self.layers[skipped](self.first(x))).square().mean()


class Skipping(Chain):
    """The head also uses the embedding's output."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        y = x
        for layer in self.layers:
            y = layer(y)
        return (x * y).mean()


REFUSED = {
    Tower: "'layers.1': breadth-first: it takes a tensor with a gradient that is not an earlier unit's",
    Adapted: "'layers.1': breadth-first: it takes a tensor with a gradient",
    Reentrant: "'layers.0': breadth-first: it runs without gradients, as under reentrant",
    Nested: "'layers.1.3': breadth-first: it runs inside of unit 'layers.1'",
    Choosing: "breadth-first: not every micro-batch goes through it",
    Skipping: "the loss uses a tensor from before the first unit",
}


def refusals() -> list[str]:
    said = []
    for make in REFUSED:
        model = sharded(make, HIER3)
        parts = [torch.full((4, 5), x) for x in (1.0, -1.0)]
        said.append(raised(lambda m=model, p=parts: lowband.accumulate(m, p, m)))
        with torch.no_grad():
            model(parts[0])
    model = sharded(Chain)
    for loss_of in (
        lambda x: model(x) + model(x),
        lambda x: model(x).detach(),
        lambda x: lowband.accumulate(model, [x], model)[0],
    ):
        said.append(raised(lambda f=loss_of: lowband.accumulate(model, [torch.ones(4, 5)], f)))
    said.append(raised(lambda: lowband.accumulate(model, [], model)))
    accumulated(model, 0)
    return said


def raised(work: Callable[[], object]) -> str:
    try:
        work()
    except UserError as error:
        return str(error)
    return ""


def test_what_is_no_chain_is_refused() -> None:
    expected = [
        *REFUSED.values(),
        "loss_of calls the module more than once",
        "loss_of returns no loss",
        "another thread runs a forward or backward of this module",
        "no micro-batches",
    ]
    for said, words in zip(on_ranks(RANKS, refusals)[0], expected, strict=True):
        assert words in said
        assert "\n" not in said


# ---- the example


def run_example(text: str) -> bool:
    names = {"lowband": lowband, "torch": torch, "module": Chain(), "Block": nn.Sequential}
    before = [value.detach().clone() for value in names["module"].parameters()]
    names["steps"] = [[micro(step, i, dist.get_rank()) for i in range(2)] for step in range(2)]
    exec(text, names)
    after = list(lowband.full_state_dict(names["module"]).values())  # on rank 0
    return len(names["losses"]) == 2 and not any(map(torch.equal, before, after))


def test_the_example_of_the_page_runs(monkeypatch) -> None:
    root = Path(__file__).parents[2]
    monkeypatch.chdir(root)
    [example, _] = re.findall(r"```python\n(.*?)```", (root / "docs" / "library.md").read_text(), re.DOTALL)
    assert on_ranks(2, run_example, example) == [True, True]


# ---- activations, and what torch keeps for each thread


class Blocks(GPT):
    """A GPT's blocks alone."""

    def forward(self, x_BTH: torch.Tensor) -> torch.Tensor:
        return self.run_blocks(x_BTH).float().sum()


def kept(recompute: str) -> int:
    """Bytes that the forwards of all micro-batches keep for their backwards, parameters left out."""
    model = Blocks(MODEL, recompute=recompute)  # type: ignore[arg-type]
    lowband.shard(model, "zero3", lowband.Topology({}), Block, torch.bfloat16)
    parameters = {unit.flat.untyped_storage()._cdata for unit in engine_of(model).units}
    held: dict[int, int] = {}
    tensors: list[torch.Tensor] = []  # kept alive, so that no address is used twice

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in parameters:
            held[storage.data_ptr()] = storage.nbytes()
        tensors.append(tensor)
        return tensor

    shape = (BATCH, MODEL.seq_len, MODEL.hidden)
    parts = [torch.randn(shape, dtype=torch.bfloat16, requires_grad=True) for _ in range(MICRO_BATCHES)]
    with saved_tensors_hooks(pack, lambda tensor: tensor):
        lowband.accumulate(model, parts, model)
    return sum(held.values())


@pytest.mark.parametrize(("recompute", "statistics"), [("none", NORM_STATISTICS), ("full", 0)])
def test_activations_of_all_micro_batches_are_kept(monkeypatch, recompute, statistics: int) -> None:
    monkeypatch.chdir(Path(__file__).parents[2])
    per_token = kept_bytes_per_token(MODEL, MODEL.seq_len, recompute, "flash").block + statistics
    [found] = on_ranks(1, kept, recompute)
    assert found == per_token * BATCH * MODEL.seq_len * MODEL.layers * MICRO_BATCHES


class Counting(TorchDispatchMode):
    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += 1
        return func(*args, **(kwargs or {}))


def state_inside() -> tuple[bool, ...]:
    """Of a coroutine: the caller's modes, and a state of its own after that."""
    seen: list[object] = []

    def call() -> int:
        seen.extend((torch.is_grad_enabled(), torch.is_autocast_enabled("cpu"), torch.get_num_threads()))
        seen.append((torch.ones(2, 2) @ torch.ones(2, 2)).device.type)
        with torch.no_grad():
            coroutine.suspend()
            seen.append(torch.is_grad_enabled())
        return 5

    torch.set_num_threads(2)
    with Counting() as mode, torch.autocast("cpu"), torch.device("meta"):
        coroutine = Coroutine(call)
        first = coroutine.resume()
        counted = mode.count
    outside = torch.is_grad_enabled()
    last = coroutine.resume()
    return (
        first and not last and outside and coroutine.take_result() == 5,
        seen == [True, True, 2, "meta", False],
        counted > 2,
    )


def test_a_coroutine_has_the_callers_state() -> None:
    assert on_ranks(1, state_inside) == [(True, True, True)]
