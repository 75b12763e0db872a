"""Optimizers on shards: right, refused by name, or warned of; LAMB and Adafactor against whole parameters."""

import gc
import warnings
import weakref
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from near import assert_near
from torch import nn

import lowband
from lowband.engine.units.known_optimizers import BY_ELEMENT, INSTEAD
from lowband.errors import UserError
from lowband.run.on_ranks import on_ranks
from lowband.spec.scheme import Scheme
from tests.wide.optimizers import whole_lamb

ZERO3 = Scheme(name="zero3", weights="world", grads="world", optim="world")
HSDP = Scheme(name="hsdp", weights="node", grads="node", optim="node")
INNER = {"node": 2}
STEPS = 4


class Odd(nn.Module):
    """Sizes that no count of ranks divides: matrices, a stack of them, vectors, zeros, a number, nothing."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        shapes = {"tall": (131, 7), "wide": (2, 301), "stack": (3, 31, 5), "vector": (259,), "number": ()}
        for name, shape in (shapes | {"none": (0, 4)}).items():
            setattr(self, name, nn.Parameter(torch.randn(shape)))
        self.zeros = nn.Parameter(torch.zeros(9, 6))

    def forward(self, seed: torch.Tensor) -> torch.Tensor:
        torch.manual_seed(int(seed))
        parts = [(torch.randn(p.shape) * p - torch.randn(p.shape)).square().sum() for p in self.parameters()]
        return torch.stack(parts).sum()


def lamb(parameters: Any, of: Any = lowband.Lamb) -> torch.optim.Optimizer:
    return of(parameters, lr=0.02, weight_decay=0.1)


def adafactor(parameters: Any, of: Any = lowband.Adafactor) -> torch.optim.Optimizer:
    return of(parameters, lr=0.05, weight_decay=0.1)


MAKE = {"lamb": (lamb, whole_lamb), "adafactor": (adafactor, torch.optim.Adafactor)}


def trained_whole(ranks: int, kind: str) -> dict[str, torch.Tensor]:
    model, (make, whole) = Odd(), MAKE[kind]
    optimizer = make([p for p in model.parameters() if p.numel()], whole)
    for step in range(STEPS):
        for rank in range(ranks):
            (model(torch.tensor(10 * step + rank)) / ranks).backward()
        optimizer.step()
        model.zero_grad()
    return {name: p.detach() for name, p in model.named_parameters()}


def trained(kind: str, scheme: Scheme) -> tuple[dict[str, torch.Tensor], list[bytes]]:
    """The weights, and the bits of this rank's states that are not sharded."""
    model = lowband.shard(Odd(), scheme, lowband.Topology(INNER), wrap=(), compute_dtype=torch.float32)
    optimizer = MAKE[kind][0](model.parameters())
    for step in range(STEPS):
        model(torch.tensor(10 * step + dist.get_rank())).backward()
        optimizer.step()
        optimizer.zero_grad()
    states = [state[key] for state in optimizer.state.values() for key in state if key.endswith("_var")]
    return lowband.full_state_dict(model), [value.numpy().tobytes() for value in states]


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("kind", MAKE)
def test_sums_over_whole_parameters(kind: str, ranks: int) -> None:
    scheme = HSDP if ranks == 4 and kind == "lamb" else ZERO3
    [expected] = on_ranks(1, trained_whole, ranks, kind)
    results = on_ranks(ranks, trained, kind, scheme)
    before = dict(Odd().named_parameters())
    for name, value in expected.items():
        if value.numel():
            moved = (value - before[name]).abs().max()
            assert 0 < (results[0][0][name] - value).abs().max() + moved * 1e-9 < moved * 1e-4, name
    assert all(states == results[0][1] for _, states in results)  # the same bits on every rank


def resumed(kind: str, folder: str, steps: range, scheme: Scheme) -> dict[str, torch.Tensor]:
    """After some steps from the newest checkpoint, if there is one, on the same data on all ranks."""
    model = lowband.shard(Odd(), scheme, lowband.Topology(INNER), wrap=(), compute_dtype=torch.float32)
    optimizer = MAKE[kind][0](model.parameters())
    checkpointer = lowband.Checkpointer(folder)
    if steps.start:
        checkpointer.load_newest(model, optimizer)
    for step in steps:
        model(torch.tensor(step)).backward()
        optimizer.step()
        optimizer.zero_grad()
    checkpointer.save(steps.stop, model, optimizer)
    checkpointer.wait()
    return lowband.full_state_dict(model)


@pytest.mark.parametrize("kind", MAKE)
def test_states_are_saved_for_other_ranks_and_schemes(kind: str, tmp_path: Path) -> None:
    expected = on_ranks(2, resumed, kind, str(tmp_path / "whole"), range(4), ZERO3)[0]
    on_ranks(2, resumed, kind, str(tmp_path / "parts"), range(2), ZERO3)
    state = on_ranks(4, resumed, kind, str(tmp_path / "parts"), range(2, 4), HSDP)[0]
    assert_near(state, expected, rtol=1e-6, atol=1e-6)


def found_norms() -> tuple[list[float], list[float], str]:
    """Of the weights and of the gradients, and what is said of a parameter that is no shard."""
    model = lowband.shard(Odd(), ZERO3, lowband.Topology(INNER), wrap=(), compute_dtype=torch.float32)
    model(torch.tensor(5)).backward()
    parameters = list(model.parameters())
    of_weights, of_gradients = (
        lowband.norms(model.parameters()),
        lowband.norms(parameters, [p.grad for p in parameters]),
    )
    with pytest.raises(UserError) as error:
        lowband.norms([nn.Parameter(torch.ones(3))])
    gradients = [p.grad for p in parameters]
    for values in ([*gradients, torch.ones(1)], gradients[1:], [None, *gradients[1:]]):
        with pytest.raises(UserError, match="values of other shapes than the parameters, or none for some"):
            lowband.norms(parameters, values)
    with pytest.raises(UserError, match=r"a module \(allowed: those of module.parameters\(\) after"):
        lowband.norms(model)  # type: ignore[arg-type]
    return [float(n) for n in of_weights], [float(n) for n in of_gradients], str(error.value)


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_norms_are_of_whole_parameters(ranks: int) -> None:
    model = Odd()
    torch.manual_seed(5)
    draws = [(torch.randn(p.shape), torch.randn(p.shape)) for p in model.parameters()]
    gradients = [2 * a * (a * p.detach() - b) for (a, b), p in zip(draws, model.parameters(), strict=True)]
    results = on_ranks(ranks, found_norms)
    assert all(result == results[0] for result in results)
    assert results[0][0] == pytest.approx(
        [p.detach().double().norm().item() for p in model.parameters()], rel=1e-12
    )
    assert results[0][1] == pytest.approx([g.double().norm().item() for g in gradients], rel=1e-6)
    assert results[0][2].startswith("norms over ranks: a parameter is no shard (allowed: those of")


# ---- by class


@pytest.mark.wide
@pytest.mark.parametrize("package", ["torch", "pytorch_optimizer"])
def test_the_known_ones_are_right(package: str) -> None:
    """On two ranks, where there is one order of summing."""
    found = on_ranks(2, by_class, package, True, time_limit_s=300)[0]
    [expected] = on_ranks(1, by_class, package, False, time_limit_s=300)
    for name, weights in expected.items():
        assert_near(found[name], weights, rtol=1e-6, atol=1e-7)


def by_class(package: str, is_sharded: bool) -> dict[str, dict[str, torch.Tensor]]:
    module = torch.optim if package == "torch" else pytest.importorskip(package)
    found, topology = {}, lowband.Topology({})
    for name in sorted(BY_ELEMENT[package]):
        model, ranks = Odd(), [dist.get_rank()] if is_sharded else range(2)
        if is_sharded:
            lowband.shard(model, ZERO3, topology, wrap=(), compute_dtype=torch.float32)
        optimizer = getattr(module, name)(model.parameters(), lr=0.01)
        for step in range(STEPS):
            for rank in ranks:
                (model(torch.tensor(10 * step + rank)) / len(ranks)).backward()
            optimizer.step()
            model.zero_grad()
        state = lowband.full_state_dict(model) if is_sharded else model.state_dict()
        found[name] = {key: value.detach() for key, value in state.items()}
    return found


# Of the package pytorch-optimizer: those that were wrong on shards, or ended in an error of their own.
NEED_WHOLES = (
    "A2Grad AdaFactor AdaTAM ApolloDQN AvaGrad CAME Conda DASH DeMo EmoFact Kron Lamb LoRARite Nero ROSE "
    "Ranger SCION SM3 SOAP SPAM SPlus Shampoo TAM"
)


@pytest.mark.parametrize("name", NEED_WHOLES.split())
def test_those_that_need_whole_parameters_are_told_by_name(name: str) -> None:
    kind = getattr(pytest.importorskip("pytorch_optimizer"), name)
    assert kind.__name__.lower() in INSTEAD


class Descent(torch.optim.Optimizer):
    """Plain gradient descent, of which lowband knows nothing."""

    def __init__(self, params: Any, lr: float = 0.01) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                p.sub_(self.update(p), alpha=group["lr"])

    def update(self, p: nn.Parameter) -> torch.Tensor:
        return p.grad


class TrustRatio(Descent):
    def update(self, p: nn.Parameter) -> torch.Tensor:
        return p.grad * p.norm()


class NormedUpdate(Descent):
    def update(self, p: nn.Parameter) -> torch.Tensor:
        return p.grad / (p.grad * 2 + 1).flatten().square().sum().sqrt()


class Orthogonal(Descent):
    def update(self, p: nn.Parameter) -> torch.Tensor:
        return (p.grad @ p.grad) * p.grad


class Centered(Descent):
    def update(self, p: nn.Parameter) -> torch.Tensor:
        return p.grad - torch.std_mean(p.grad)[1]


class ByGradient(Descent):
    """Has a rule for matrices, which it tells by their gradient, and one for vectors."""

    def update(self, p: nn.Parameter) -> torch.Tensor:
        return p.grad @ p.grad.mT if p.grad.ndim == 2 else p.grad


class ByMomentum(Descent):
    """Tells matrices by a state, as Muon does."""

    def update(self, p: nn.Parameter) -> torch.Tensor:
        momentum = self.state[p].setdefault("momentum", torch.zeros_like(p.grad))
        update = momentum.mul_(0.9).add_(p.grad)
        return update / update.size(-2) if update.dim() > 1 else update


class Soap(Descent):
    """Named as one that needs whole matrices."""


class Spam(Descent):
    """Looks at shapes as soon as it is made."""

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.masks = [torch.zeros(p.shape[1]) for group in self.param_groups for p in group["params"]]


class Prodigy(Descent):
    """Sums over all parameters."""


class Wrapping(torch.optim.Optimizer):
    """Around another one, with as few of torch's attributes as the package pytorch-optimizer's Lookahead."""

    def __init__(self, params: Any) -> None:
        self.inner = torch.optim.SGD(params, lr=0.01)
        self.param_groups, self.state, self.defaults = self.inner.param_groups, self.inner.state, {}
        self._optimizer_step_pre_hooks, self._optimizer_step_post_hooks = OrderedDict(), OrderedDict()
        self._patch_step_function()

    def step(self) -> None:
        self.inner.step()


def what_becomes_of_a_step() -> tuple[int, int, bool]:
    """Calls of a user's own step, false warnings of a scheduler, whether its states live on after it."""
    model = lowband.shard(Odd(), ZERO3, lowband.Topology(INNER), wrap=(), compute_dtype=torch.float32)
    parameters, calls = list(model.parameters()), []
    optimizer = torch.optim.AdamW(parameters[:1])
    step = optimizer.step
    optimizer.step = lambda: (calls.append(1), step())  # type: ignore[method-assign]
    optimizer.add_param_group({"params": parameters[1:]})
    other = torch.optim.AdamW(parameters)
    schedule = torch.optim.lr_scheduler.ExponentialLR(other, 0.9)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model(torch.tensor(dist.get_rank())).backward()
        optimizer.step()
        other.step()
        schedule.step()
    gc.disable()
    moment = weakref.ref(next(iter(other.state.values()))["exp_avg"])
    del other, schedule
    return len(calls), len(caught), moment() is not None


def test_a_step_stays_the_users_and_an_optimizer_is_freed() -> None:
    assert on_ranks(2, what_becomes_of_a_step) == [(1, 0, False)] * 2


def said_of(kind: Callable[[Any], torch.optim.Optimizer]) -> tuple[str, list[str]]:
    """The error of two steps of two optimizers, and the warnings."""
    model = lowband.shard(Odd(), ZERO3, lowband.Topology(INNER), wrap=(), compute_dtype=torch.float32)
    model(torch.tensor(dist.get_rank())).backward()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            for optimizer in (kind(model.parameters()), kind(model.parameters())):
                optimizer.step()
                optimizer.step()
        except UserError as error:
            return str(error), [str(each.message) for each in caught]
    return "", [str(each.message) for each in caught]


@pytest.mark.parametrize(
    ("kind", "error"),
    [
        (Descent, ""),
        (Wrapping, ""),
        (TrustRatio, "tall: norm of a shard covers this rank's part only (allowed: "),
        (NormedUpdate, "sum of a shard's gradient covers this rank's part only (allowed: "),
        (ByGradient, "tall: mT of a shard's gradient covers this rank's part only (allowed: "),
        (ByMomentum, "tall: a shard is 1D, and has no size(-2) (allowed: p.shard_of.shape"),
        (Orthogonal, "matmul of a shard's gradient covers this rank's part only (allowed: "),
        (Centered, "std_mean of a shard's gradient covers this rank's part only (allowed: "),
        (
            Soap,
            "Soap: needs whole parameters, and each rank holds flat pieces of them (allowed: lowband.Mat",
        ),
        (
            Spam,
            "Spam: needs whole parameters, and each rank holds flat pieces of them (allowed: lowband.Mat",
        ),
        (Prodigy, "(allowed: optimizers that work element by element)"),
        (torch.optim.Adafactor, "(allowed: lowband.Adafactor, which sums over all ranks)"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_others_are_refused_or_warned_of_once(kind: Callable[..., Any], error: str) -> None:
    by_rank = on_ranks(2, said_of, kind)
    is_named = kind.__name__.lower() in INSTEAD
    for rank, (said, warned) in enumerate(by_rank):
        assert error in said
        assert bool(said) == bool(error)
        assert len(warned) == (rank == 0 and not is_named)
        assert "\n" not in "".join([said, *warned])
        assert all(
            text.startswith(f"{kind.__name__} is not known to work element by element") for text in warned
        )


def with_a_closure(kind: str, is_closure: bool) -> dict[str, torch.Tensor]:
    model = lowband.shard(Odd(), ZERO3, lowband.Topology(INNER), wrap=(), compute_dtype=torch.float32)
    optimizer = MAKE[kind][0](model.parameters())
    for step in range(2):

        def closure(step: int = step) -> torch.Tensor:
            optimizer.zero_grad()
            loss = model(torch.tensor(step))
            loss.backward()
            return loss

        if is_closure:
            optimizer.step(closure)
        else:
            closure()
            optimizer.step()
    return lowband.full_state_dict(model)


@pytest.mark.parametrize("kind", MAKE)
def test_a_closure_makes_the_same_step(kind: str) -> None:
    found, expected = (on_ranks(2, with_a_closure, kind, each)[0] for each in (True, False))
    assert all(torch.equal(found[name], value) for name, value in expected.items())
