"""Losses that do not go through a unit's output alone: right, bit by bit, whatever the scheme."""

from functools import partial

import pytest
import reference
import torch
import torch.distributed as dist
from modules import inputs
from side_losses import CHAINED, PROGRAMS, Block, alone

import lowband
from lowband.engine.passes.engine import engine_of
from lowband.run.on_ranks import on_ranks
from lowband.spec.mesh import Levels
from tests.checkout import CONFIG
from tests.refused import answer

RANKS, STEPS, MICRO_BATCHES = 4, 2, 2
INNER = {"package": 2, "node": 2}
SCHEMES = ("zero1", "zero2", "hpz", "hsdp", "hier3-exact", "ddp")
FEW = ("after", "units return dataclasses", "gradient penalty")  # under every scheme
ROUNDED = set(PROGRAMS) - set(CHAINED)

State = dict[str, torch.Tensor]
Names = tuple[str, ...]


def sgd(parameters) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


def batch_of(step: int, micro: int, rank: int) -> torch.Tensor:
    return inputs(10 * step + micro, rank)


def expected(scheme: str, names: Names, ranks: int) -> dict[str, State]:
    levels, no_clip = Levels.fit(INNER, ranks), float("inf")
    found = {}
    for name in names:
        make, loss_of = PROGRAMS[name]
        *_, found[name] = reference.train(
            make(), loss_of, lambda *place: (batch_of(*place),), CONFIG.scheme(scheme), levels, STEPS,
            MICRO_BATCHES, no_clip, sgd,
        )  # fmt: skip
    return found


def sharded(name: str, scheme: str, topology: lowband.Topology, overlap: bool = True) -> torch.nn.Module:
    make, _ = PROGRAMS[name]
    return lowband.shard(
        make(), CONFIG.scheme(scheme), topology, Block, compute_dtype=torch.float32, overlap=overlap
    )


def train(name: str, scheme: str, topology: lowband.Topology, overlap: bool, breadth: bool = False) -> State:
    model = sharded(name, scheme, topology, overlap)
    optimizer, (_, loss_of) = sgd(model.parameters()), PROGRAMS[name]

    def part_of_loss(x: torch.Tensor) -> torch.Tensor:
        return loss_of(model, x) / MICRO_BATCHES

    for step in range(STEPS):
        parts = [batch_of(step, i, dist.get_rank()) for i in range(MICRO_BATCHES)]
        if breadth:
            lowband.accumulate(model, parts, part_of_loss)
        else:
            engine_of(model).sync = False
            for i, part in enumerate(parts):
                engine_of(model).sync = i == MICRO_BATCHES - 1
                part_of_loss(part).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert not any(engine_of(model).meter.now[kind] for kind in ("gathered", "sums"))
    return lowband.full_state_dict(model)


def train_all(scheme: str, names: Names, is_whole: bool) -> dict[tuple[str, bool], list[State]]:
    """By program and whether breadth-first, with overlap or without, in turns; is_whole: with and without."""
    topology, found = lowband.Topology(INNER), {}
    for place, name in enumerate(names):
        for breadth in (False, True) if name in CHAINED else (False,):
            overlaps = (True, False) if is_whole else ((place + breadth) % 2 == 0,)
            found[name, breadth] = [train(name, scheme, topology, overlap, breadth) for overlap in overlaps]
    return found


def compare(scheme: str, names: Names, is_whole: bool = False, ranks: int = RANKS) -> None:
    [want] = on_ranks(1, expected, scheme, names, ranks)
    found = on_ranks(ranks, train_all, scheme, names, is_whole, time_limit_s=900)[0]
    for (name, breadth), (first, *others) in found.items():
        for key, value in want[name].items():
            for other in others:
                assert torch.equal(first[key], other[key]), (name, breadth, key)
            # Breadth-first, and where torch.autograd.grad is a backward of its own, sums have another order.
            if breadth or (name in ROUNDED and CONFIG.scheme(scheme).grads != "world"):
                assert torch.allclose(first[key], value, rtol=1e-5, atol=1e-6), (name, key)
            else:
                assert torch.equal(first[key], value), (name, key)


@pytest.mark.parametrize("names", [tuple(PROGRAMS)[i::3] for i in range(3)], ids=["a", "b", "c"])
def test_every_program_under_zero3(names: Names) -> None:
    """On two ranks: what a program asks of the passes does not depend on how many there are."""
    compare("zero3", names, ranks=2)


@pytest.mark.parametrize(
    "scheme", [*SCHEMES[-2:], *(pytest.param(scheme, marks=pytest.mark.wide) for scheme in SCHEMES[:-2])]
)
def test_under_every_scheme(scheme: str) -> None:
    compare(scheme, FEW)


@pytest.mark.wide
@pytest.mark.parametrize("scheme", ("zero3", *SCHEMES))
def test_every_program_under_every_scheme(scheme: str) -> None:
    """With overlap and without, which have the same bits."""
    compare(scheme, tuple(PROGRAMS), is_whole=True)


def changed_between(scheme: str) -> list[str]:
    """What a loss inside of a unit is refused with if the unit's weights changed after its forward: frozen
    ones, and where only the input's gradient is asked for. No gradient of theirs would tell."""
    topology, x, said = lowband.Topology({}), batch_of(0, 0, dist.get_rank()), []
    for is_frozen in (True, False):
        net, _ = PROGRAMS["after"]
        plain = net()
        plain.blocks[1].requires_grad_(not is_frozen)
        model = lowband.shard(plain, CONFIG.scheme(scheme), topology, Block, compute_dtype=torch.float32)
        arrives = x.clone().requires_grad_()
        model(arrives)
        side = model.blocks[1].side
        with torch.no_grad():
            for parameter in model.blocks[1].parameters():
                parameter.mul_(2)
        said.append(answer(side.backward if is_frozen else partial(torch.autograd.grad, side, arrives)))
    return said


@pytest.mark.parametrize("scheme", ["ddp", "zero1", "zero3"])
def test_weights_that_changed_before_their_use_are_noticed(scheme: str) -> None:
    for said in on_ranks(2, changed_between, scheme)[0]:
        assert "changed between this forward and its backward" in said


def refusals() -> list[str]:
    topology, x = lowband.Topology({}), batch_of(0, 0, dist.get_rank())
    said = []

    for scheme in ("ddp", "zero1", "zero3"):  # a side loss that outlives its weights
        model = sharded("penalty", scheme, topology)
        alone(model, x).backward()
        kept = alone(model, x)
        sgd(model.parameters()).step()
        said.append(answer(kept.backward))

    model = sharded("after", "zero3", topology)
    y = model(x)
    model.zero_grad()
    said.append(answer(lambda: model.blocks[0].side.grad_fn.next_functions and saved_weight(y)))

    model, listed = sharded("after", "zero3", topology), []
    for block in model.blocks:
        block.register_forward_hook(lambda block, _args, _out: listed.append(block.side))
    said.append(answer(lambda: lowband.accumulate(model, [x, x], lambda x: model(x).mean() + sum(listed))))

    model = sharded("a gradient inside of units", "zero3", topology)
    said.append(answer(lambda: lowband.accumulate(model, [x], lambda x: model(x).mean())))
    return said


def saved_weight(y: torch.Tensor) -> torch.Tensor:
    """A weight of the last unit but the root that the graph behind `y` keeps."""
    node = y.grad_fn.next_functions[1][0]
    while not hasattr(node, "_saved_mat2"):
        node = node.next_functions[1][0]
    return node._saved_mat2


def test_what_remains_impossible_is_refused() -> None:
    expected_words = [
        "weights of 'blocks.2' changed between this forward and its backward",
        "weights of 'blocks.2' changed between this forward and its backward",
        "weights of 'blocks.2' changed between this forward and its backward",
        "'blocks.2': weights that a forward saved are read outside of a backward",
        "breadth-first: the loss uses a tensor of another micro-batch",
        "Net: a backward inside of a forward of several micro-batches",
    ]
    for said, words in zip(on_ranks(2, refusals)[0], expected_words, strict=True):
        assert words in said
        assert "\n" not in said
