"""lowband.shard on any module: the usual loop, held against the same loop on one device."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

import lowband
from lowband.run.group import on_ranks
from lowband.cost.bytes import sent_bytes
from lowband.engine.api import engine_of
from lowband.engine.states import UnitState
from lowband.errors import UserError
from lowband.spec.scheme import Scheme

ROOT = Path(__file__).parents[2]
INNER = {"package": 2, "node": 4}  # of slurm/local
HIER3 = Scheme(name="hier3-exact", weights="package", grads="node", optim="world")
HPZ = Scheme(name="hpz", weights="world", secondary="node", grads="world", optim="world")
DDP = Scheme(name="ddp", weights="self", grads="self", optim="self")
STEPS = 3


class Tower(nn.Module):
    """Odd sizes, parameters smaller than the group, a buffer, a scalar, an unused parameter."""

    def __init__(self, checkpointing: bool = False, reentrant: bool = False) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first = nn.Linear(5, 7)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(7, 3), nn.Tanh(), nn.Linear(3, 7)) for _ in range(3)
        )
        self.scale = nn.Parameter(torch.tensor(0.5))
        self.unused = nn.Parameter(torch.ones(3))
        self.register_buffer("shift", torch.linspace(0, 1, 7))
        self.checkpointing, self.reentrant = checkpointing, reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x) + self.shift
        for layer in self.layers:
            y = checkpoint(layer, x, use_reentrant=self.reentrant) if self.checkpointing else layer(x)
            x = x + y * self.scale
        return x.square().mean()


def is_layer(module: nn.Module) -> bool:
    return isinstance(module, nn.Sequential)


def inputs(step: int, rank: int) -> torch.Tensor:
    return torch.randn(4, 5, generator=torch.Generator().manual_seed(100 * step + rank))


def loop(model: nn.Module, make_optimizer, batches) -> list[float]:
    """The usual loop; `batches(step)` gives one or more inputs whose losses are averaged."""
    optimizer = make_optimizer([p for p in model.parameters() if p.requires_grad])
    losses = []
    for step in range(STEPS):
        parts = batches(step)
        total = 0.0
        for part in parts:
            loss = model(part) / len(parts)
            loss.backward()
            total += loss.item()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    return losses


def single(make_model, make_optimizer, ranks: int):
    model = make_model()
    loop(model, make_optimizer, lambda step: [inputs(step, rank) for rank in range(ranks)])
    return {name: value.detach() for name, value in model.state_dict().items()}


def sharded(make_model, make_optimizer, scheme: Scheme, wrap):
    model = lowband.shard(make_model(), scheme, lowband.Topology(INNER), wrap, compute_dtype=torch.float32)
    loop(model, make_optimizer, lambda step: [inputs(step, dist.get_rank())])
    return lowband.full_state_dict(model)


def adamw(parameters):
    return torch.optim.AdamW(parameters, lr=1e-2)


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=1e-1, momentum=0.9, nesterov=True)


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


@pytest.mark.parametrize("make_optimizer", [adamw, sgd, adagrad, fused])
@pytest.mark.parametrize("scheme", [HIER3, HPZ, DDP], ids=lambda s: s.name)
def test_plain_module_with_any_optimizer(scheme: Scheme, make_optimizer) -> None:
    [expected] = on_ranks(1, single, Tower, make_optimizer, 8)
    assert_same(on_ranks(8, sharded, Tower, make_optimizer, scheme, is_layer)[0], expected, "unused")


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
        y = checkpoint(self.layers[0], self.into(x) if not self.head else x.requires_grad_(), use_reentrant=True)
        return (self.into(y) if self.head else y).square().mean()


class TiedHead(TiedPair):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self[0](x @ self[1].weight.T).tanh() @ self[1].weight


@pytest.mark.parametrize("head", [False, True])
@pytest.mark.parametrize("scheme", [HIER3, HPZ, DDP], ids=lambda s: s.name)
def test_tied_weight_under_reentrant_checkpointing(scheme: Scheme, head: bool) -> None:
    """Its gradient comes in two pieces, of which either may be the first."""

    def make_model() -> nn.Module:
        model = TiedAndCheckpointed(head)
        if head:
            model.layers[0].__class__ = TiedHead
        return model

    [expected] = on_ranks(1, single, make_model, sgd, 4)
    assert_same(on_ranks(4, sharded, make_model, sgd, scheme, is_layer)[0], expected)


class HalfFrozen(Tower):
    def __init__(self) -> None:
        super().__init__()
        for parameter in (*self.first.parameters(), *self.layers[1].parameters(), self.layers[0][0].bias):
            parameter.requires_grad_(False)


@pytest.mark.parametrize("make_model", [Tied, HalfFrozen, lambda: Adapted()], ids=["tied", "half-frozen", "adapted"])
@pytest.mark.parametrize("scheme", [HIER3, HPZ, DDP], ids=lambda s: s.name)
def test_tied_and_frozen_parameters(scheme: Scheme, make_model) -> None:
    [expected] = on_ranks(1, single, make_model, sgd, 4)
    assert_same(on_ranks(4, sharded, make_model, sgd, scheme, is_layer)[0], expected, "unused")


def levels_of_a_cluster():
    return lowband.Topology.from_cluster("local", ROOT).levels, lowband.Topology(INNER).levels


def test_a_topology_is_read_from_a_cluster_file() -> None:
    for found, expected in on_ranks(8, levels_of_a_cluster):
        assert found == expected


def count_checkpointed(checkpointing: tuple[bool, bool], scheme: Scheme):
    """Bytes of the second step, and their closed form."""
    topology = lowband.Topology(INNER)
    model = lowband.shard(Tower(*checkpointing), scheme, topology, is_layer, compute_dtype=torch.float32)
    engine, optimizer = engine_of(model), sgd(model.parameters())
    for step in range(2):
        engine.ledger.take()
        model(inputs(step, dist.get_rank())).backward()
        optimizer.step()
        optimizer.zero_grad()
    sent = {(s.level, s.collective, s.wire): s.bytes for s in engine.ledger.take()}
    units = [unit.layout.numel for unit in engine.units]
    return sent, sent_bytes(units, scheme, topology.levels, "fp32", "fp32", 1, False)


@pytest.mark.parametrize("checkpointing", [(False, False), (True, False), (True, True)])
@pytest.mark.parametrize("scheme", [HIER3, HPZ], ids=lambda s: s.name)
def test_checkpointing_sends_no_more(scheme: Scheme, checkpointing: tuple[bool, bool]) -> None:
    """Recomputation uses the backward's gather: with hpZ nothing crosses the node a second time."""
    for sent, expected in on_ranks(8, count_checkpointed, checkpointing, scheme):
        assert sent == expected


def gathers_on_demand(make_model, wrap) -> list[str]:
    """Units, but the root's, whose gather was not under way when the second step needed them."""
    model = lowband.shard(make_model(), HPZ, lowband.Topology(INNER), wrap)
    engine = engine_of(model)
    gather, found = engine._gather, []

    def watched(units, backward: bool) -> None:
        found.extend(unit.name for unit in units if unit.state is UnitState.SHARDED)
        gather(units, backward)

    engine._gather = watched
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


class Adapted(nn.Module):
    """A tower of frozen layers, each with a small trainable adapter, as in LoRA."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(6)
        self.first = nn.Linear(5, 64)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64, bias=False)) for _ in range(6))
        for layer in self.layers:
            layer[0].requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = x + layer(x).tanh()
        return x.square().mean()


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
    for step in range(STEPS):
        tokens = torch.randint(0, 61, (2, 16), generator=torch.Generator().manual_seed(step))
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("scheme", [HIER3, HPZ], ids=lambda s: s.name)
def test_hugging_face_model(scheme: Scheme) -> None:
    pytest.importorskip("transformers")
    [expected] = on_ranks(1, huggingface_losses, None)
    assert on_ranks(4, huggingface_losses, scheme)[0] == pytest.approx(expected, rel=1e-5)


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
    for a, b in zip(grads, expected):
        assert torch.allclose(a, b, rtol=1e-5, atol=1e-7)


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
        stayed += [p.grad.data_ptr() == place for p, place in zip(model.parameters(), places)]
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
    for step in range(4):
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


@pytest.mark.parametrize("checkpointing", [(False, False), (True, False), (True, True)])
@pytest.mark.parametrize("scheme", [HIER3, HPZ], ids=lambda s: s.name)
def test_training_goes_on_after_a_broken_backward(scheme: Scheme, checkpointing: tuple[bool, bool]) -> None:
    """As if the step had been made and thrown away with zero_grad."""
    broken, whole = (
        on_ranks(4, train_through_a_broken_backward, checkpointing, scheme, breaks) for breaks in (True, False)
    )
    for (losses, held, _), (expected, _, _) in zip(broken, whole):
        assert losses == expected
        assert set(held) == {0}
    assert all(torch.equal(broken[0][2][name], value) for name, value in whole[0][2].items())


def bf16_inputs_and_outputs():
    model = lowband.shard(nn.Sequential(nn.Linear(5, 6)), HIER3, lowband.Topology(INNER), nn.Linear)
    out = model(torch.ones(2, 5))
    shards = [p.dtype for p in model.parameters()]
    return out.dtype, shards


def test_default_compute_dtype_is_bf16_with_fp32_shards() -> None:
    for out, shards in on_ranks(2, bf16_inputs_and_outputs):
        assert out == torch.bfloat16
        assert set(shards) == {torch.float32}


def state_after_a_lost_forward() -> list[str]:
    model = lowband.shard(Tower(), HIER3, lowband.Topology(INNER), is_layer)
    model(inputs(0, dist.get_rank()))
    return list(lowband.full_state_dict(model))


def test_state_after_a_forward_without_backward() -> None:
    assert on_ranks(4, state_after_a_lost_forward)[0] == list(Tower().state_dict())


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
        lambda: lowband.Topology({"node": 3}),
        lambda: lowband.Topology({"node": 0}),
    ):
        try:
            attempt()
            said.append("")
        except UserError as error:
            said.append(str(error))
    return said


def test_mistakes_are_told() -> None:
    for said, words in zip(
        on_ranks(2, mistakes)[0],
        (
            "no parameters",
            "no level 'rack' (allowed: self",
            "inner to outer",
            "sharded already",
            "not sharded",
            "",
        ),
    ):
        assert words in said
