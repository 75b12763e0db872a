"""One collective, flat or of joined hops: the values of hops, in the order of the ring or in that of hops."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from test_wires import BLOCK, GRAD_REDUCE, SHARD, values_of

from lowband.engine.collectives.collectives import Collectives
from lowband.engine.options import Options
from lowband.engine.transport.axis import Axis
from lowband.engine.transport.ledger import Ledger
from lowband.engine.transport.meter import MemoryMeter
from lowband.engine.transport.topology import Topology
from lowband.run.on_ranks import on_ranks
from lowband.spec.mesh import SELF, WORLD, Levels
from lowband.spec.scheme import Scheme

CASES = [(2, {}), (3, {}), (4, {"node": 2}), (8, {"package": 2, "node": 4})]
CASES.append(pytest.param(6, {"node": 3}, marks=pytest.mark.wide))
WIRES = ("native", "fp32", "bf16", "int8", "int4")


def collectives_of(axis: Axis, wire: str, pattern: str) -> Collectives:
    scheme = Scheme(
        name="w", weights=WORLD, grads=WORLD, optim=WORLD, forward_gather=wire, grad_reduce=wire,
        block_size=BLOCK,
    )  # fmt: skip
    options = Options(overlap=False, pattern=pattern)
    return Collectives(scheme, axis, Ledger(), MemoryMeter(), torch.device("cpu"), options)


def gathered(messages: Collectives, shard: torch.Tensor) -> torch.Tensor:
    out = torch.full((shard.numel() * messages.axis.levels.world,), torch.nan, dtype=shard.dtype)
    work = partial(messages.gather, shard=shard, out=out, inner=SELF, outer=WORLD, name="forward_gather")
    messages.submit("unit", messages.inwards(SELF, WORLD), work)
    return out


def reduced(messages: Collectives, full: torch.Tensor) -> torch.Tensor:
    found = []

    def work(call):
        found.append((yield from messages.reduce(call, full.clone(), GRAD_REDUCE)))

    messages.submit("unit", messages.levels_of_reduction(GRAD_REDUCE, full.dtype), work)
    return found[0]


def give_up_gloo(axis: Axis) -> None:
    """Run the path of NCCL and RCCL, with gloo's own collectives under it."""
    for bounds in (axis._groups, axis._joined):
        for key, bound in bounds.items():
            bounds[key] = replace(bound, back=None)


def all_patterns(inner: dict[str, int], is_native: bool):
    """By wire and pattern: what is gathered, reduced, and reduced of whole numbers; and the values."""
    axis = Topology(inner).along("data")
    numel = SHARD * axis.levels.world
    values = values_of(axis.rank, numel)
    found = {}
    for wire in WIRES:
        for pattern in ("hops", "flat", "joined"):
            messages = collectives_of(axis, wire, pattern)
            if is_native:
                give_up_gloo(axis)
            found[wire, pattern] = (
                gathered(messages, values[:SHARD]),
                reduced(messages, values),
                reduced(messages, values.round()),
                reduced(messages, values.bfloat16()),
            )
    return values, found


def in_ring_order(held: list[torch.Tensor], levels: Levels, rank: int) -> torch.Tensor:
    """The sum of a rank's shard: the ranks after it in turn, then its own."""
    ranks = len(held)
    place = levels.ring(SELF, WORLD).places[rank]
    parts = [values.chunk(ranks)[place] for values in held]
    total = parts[(rank + 1) % ranks].clone()
    for step in range(2, ranks + 1):
        total += parts[(rank + step) % ranks]
    return total


@pytest.mark.parametrize(("ranks", "inner"), CASES)
def test_values_of_one_collective(ranks: int, inner: dict[str, int]) -> None:
    """Gathers equal those of hops. Sums equal the ring's order bit by bit, and those of hops nearly: each
    order rounds n - 1 times, by eps / 2 of the terms' absolute values at most. Joined hops give the bits of
    hops in everything."""
    levels = Levels.fit(inner, ranks)
    values, by_rank = zip(*on_ranks(ranks, all_patterns, inner, False), strict=True)
    halves = [value.bfloat16() for value in values]
    largest = torch.stack(values).abs().sum(0)
    for rank, found in enumerate(by_rank):
        place = levels.ring(SELF, WORLD).places[rank]
        bound = (ranks - 1) * torch.finfo(torch.float32).eps * largest.chunk(ranks)[place]
        for wire in WIRES:
            (gather, reduce, whole, half), hops = found[wire, "flat"], found[wire, "hops"]
            for joined, expected in zip(found[wire, "joined"], hops, strict=True):
                assert torch.equal(joined, expected)
            assert torch.equal(gather, hops[0])
            if wire in ("native", "fp32"):
                assert torch.equal(reduce, in_ring_order(values, levels, rank))
                assert ((reduce - hops[1]).abs() <= bound).all()
                assert ranks > 2 or torch.equal(reduce, hops[1])
            else:  # an encoded reduction is never flat
                assert torch.equal(reduce, hops[1])
            assert torch.equal(whole, hops[2])
            if wire in ("native", "bf16"):
                assert torch.equal(half, in_ring_order(halves, levels, rank))


@pytest.mark.parametrize(
    ("ranks", "inner"), [(6, {"node": 3}), pytest.param(8, {"package": 2, "node": 4}, marks=pytest.mark.wide)]
)
def test_a_back_ends_own_collectives_are_in_the_order_of_ranks(ranks: int, inner: dict[str, int]) -> None:
    for _, found in on_ranks(ranks, all_patterns, inner, True):
        for wire in WIRES:
            for pattern in ("flat", "joined"):
                one, hops = found[wire, pattern], found[wire, "hops"]
                assert torch.equal(one[0], hops[0])
                assert torch.equal(one[2], hops[2])  # sums of whole numbers
