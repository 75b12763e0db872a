"""Several sharded modules in one process train as one module does, bit for bit, under delays.

The reference is the same graph sharded as one module, which test_parity and test_placements compare with one
process.
"""

import copy
import itertools
import random
import time

import pytest
import torch
import torch.distributed as dist
from torch import nn

import lowband
from lowband.engine.transport import axis, gloo
from lowband.run.on_ranks import on_ranks
from lowband.spec.scheme import Scheme
from tests.pairwise import pairwise

ZERO3 = Scheme(name="zero3", weights="world", grads="world", optim="world")
HIER3 = Scheme(name="hier3-exact", weights="node", grads="node", optim="world")
HPZ = Scheme(name="hpz", weights="world", secondary="node", grads="world", optim="world")
INNER = {"node": 2}
STEPS = 3
UNEQUAL = (16, 24, 8, 16)
WIDTHS = {"equal": (16, 16, 16, 16), "unequal": UNEQUAL}
WAYS = ("together", "one", "two")


def net(seed: int, widths: tuple[int, ...]) -> nn.Sequential:
    torch.manual_seed(seed)
    layers = [nn.Sequential(nn.Linear(a, b), nn.Tanh()) for a, b in itertools.pairwise(widths)]
    return nn.Sequential(*layers)


def is_layer(module: nn.Module) -> bool:
    return isinstance(module, nn.Sequential) and isinstance(module[0], nn.Linear)


def delay_messages() -> None:
    """Each rank is late by a time of its own before each exchange."""
    exchange, chance = gloo.exchange, random.Random(dist.get_rank())

    def late(*arguments) -> None:
        time.sleep(chance.random() * 2e-3)
        exchange(*arguments)

    axis.exchange = late


def inputs(step: int, micro: int = 0) -> torch.Tensor:
    return torch.randn(
        4, 16, generator=torch.Generator().manual_seed(1000 * step + 10 * micro + dist.get_rank())
    )


class Both(nn.Module):
    """Two nets as one module."""

    def __init__(self, first: nn.Module, second: nn.Module) -> None:
        super().__init__()
        self.first, self.second = first, second

    def forward(self, loss_of, *args) -> torch.Tensor:
        return loss_of(self.first, self.second, *args)


def encoder_decoder(encode, decode, step: int) -> torch.Tensor:
    x = inputs(step)
    return (decode(encode(x)) - x).square().mean()


def actor_critic(actor, critic, step: int) -> torch.Tensor:
    x = inputs(step)
    action = actor(x)
    value = critic(x + action)
    return (value - 1).square().mean() - 0.1 * critic(action.detach()).mean() + action.square().mean()


def student_teacher(student, teacher, step: int) -> torch.Tensor:
    x = inputs(step)
    return (student(x) - teacher(x)).square().mean() + teacher(student(x)).mean()


def in_flight(first, second, step: int) -> torch.Tensor:
    """Two micro-batches go forward before either goes backward."""
    x, y = inputs(step, 0), inputs(step, 1)
    one = second(first(x)).square().mean()
    other = second(first(y)).square().mean()
    return one + other


def train_in_every_way(loss_of, scheme: Scheme, widths, is_frozen: bool) -> list[list[torch.Tensor]]:
    """Weights by way, one after the other in one process."""
    delay_messages()
    return [train(loss_of, scheme, widths, is_frozen, how) for how in WAYS]


def train(loss_of, scheme: Scheme, widths, is_frozen: bool, how: str) -> list[torch.Tensor]:
    """The whole weights after training the two nets `together`, or apart on `one` topology or on `two`."""
    first, second = net(1, widths), net(2, widths[::-1])
    second.requires_grad_(not is_frozen)
    levels = INNER if dist.get_world_size() > 2 else {}
    shared = lowband.Topology(levels)
    shard = lambda module, on: lowband.shard(module, scheme_for(scheme), on, is_layer, torch.float32)  # noqa: E731
    if how == "together":
        module = shard(Both(first, second), shared)
        modules = [module]
    else:
        other = lowband.Topology(levels) if how == "two" else shared
        modules = [shard(first, shared), shard(second, other)]
        module = Both(first, second)
    parameters = [p for m in modules for p in m.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(parameters, lr=0.1, momentum=0.9)
    for step in range(STEPS):
        module(loss_of, step).backward()
        optimizer.step()
        optimizer.zero_grad()
    return [value for m in modules for value in lowband.full_state_dict(m).values()]


def scheme_for(scheme: Scheme) -> Scheme:
    """On two ranks there is no level inside the world."""
    if dist.get_world_size() > 2:
        return scheme
    return Scheme(name=scheme.name, weights="world", grads="world", optim="world")


LOSSES = {
    "encoder-decoder": encoder_decoder,
    "actor-critic": actor_critic,
    "frozen-teacher": student_teacher,
    "in-flight": in_flight,
}


@pytest.mark.parametrize(
    ("loss", "ranks", "widths"),
    [
        *pairwise(itertools.product(LOSSES, (2, 4), WIDTHS), size=1),
        *(pytest.param(*each, marks=pytest.mark.wide) for each in itertools.product(LOSSES, (8,), WIDTHS)),
    ],
)
def test_two_sharded_modules_train_as_one(loss: str, ranks: int, widths: str) -> None:
    scheme = {2: ZERO3, 4: HIER3, 8: HPZ}[ranks]
    is_frozen = loss == "frozen-teacher"
    arguments = LOSSES[loss], scheme, WIDTHS[widths], is_frozen
    expected, *apart = on_ranks(ranks, train_in_every_way, *arguments)[0]
    for got, how in zip(apart, WAYS[1:], strict=True):
        assert len(got) == len(expected) == 12
        assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True)), how


def micro_batch(step: int, micro: int, rank: int) -> torch.Tensor:
    return torch.randn(4, 16, generator=torch.Generator().manual_seed(100 * step + 10 * micro + rank))


def separate_backwards(is_sharded: bool) -> list[torch.Tensor]:
    """Forward, forward, a forward that gets no backward, then the first two's backward passes."""
    model = net(3, UNEQUAL)
    if is_sharded:
        lowband.shard(model, HPZ, lowband.Topology(INNER), is_layer, torch.float32)
        delay_messages()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ranks = [dist.get_rank()] if is_sharded else range(4)
    for step in range(STEPS):
        for rank in ranks:
            one, two = (model(micro_batch(step, micro, rank)).square().mean() for micro in range(2))
            with torch.no_grad():
                model(micro_batch(step, 2, rank))
            (one / len(ranks)).backward()
            (two / len(ranks)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return list(
        (lowband.full_state_dict(model) if is_sharded else copy.deepcopy(model.state_dict())).values()
    )


def test_forwards_before_their_backwards() -> None:
    [expected] = on_ranks(1, separate_backwards, False)
    got = on_ranks(4, separate_backwards, True)[0]
    assert all(torch.allclose(a, b, rtol=1e-5, atol=1e-6) for a, b in zip(got, expected, strict=True))
