"""Collectives on every wire give, bit by bit, what one process computes from all ranks' values."""

import pytest
import torch

from lowband.engine.collectives.collectives import Collectives
from lowband.engine.collectives.wire import decode, decode_sum, encode, sum_encode
from lowband.engine.options import Options
from lowband.engine.transport.ledger import Ledger
from lowband.engine.transport.meter import MemoryMeter
from lowband.engine.transport.topology import Topology
from lowband.kernels.block_quant import dequantize, quantize
from lowband.run.on_ranks import on_ranks
from lowband.spec.mesh import SELF, WORLD, Levels
from lowband.spec.scheme import Scheme
from lowband.spec.step import reductions
from lowband.spec.wire import DTYPE_BYTES, MESSAGE_ALIGN, WIRE_BITS, message_bytes

[GRAD_REDUCE] = reductions("pass")
BLOCK = 24  # divides neither a shard nor a power of two
SHARD = 32 * 3
CASES = [
    (2, {}),
    (4, {"node": 2}),
    pytest.param(8, {"package": 2, "node": 4}, marks=pytest.mark.wide),
    (8, {"a": 2, "b": 2, "c": 4}),
    pytest.param(6, {"node": 3}, marks=pytest.mark.wide),
]


def through(values: torch.Tensor, wire: str) -> torch.Tensor:
    """What arrives of one message."""
    if wire in WIRE_BITS:
        bits = WIRE_BITS[wire]
        return dequantize(*quantize(values.view(1, -1), bits, BLOCK), bits, BLOCK)[0]
    return values.bfloat16().float() if wire == "bf16" else values


def values_of(rank: int, numel: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rank)
    return torch.randn(numel, generator=generator) * 10.0 ** torch.randint(
        -3, 3, (numel,), generator=generator
    )


def collectives(wire: str, inner: dict[str, int]) -> tuple[Collectives, Ledger]:
    scheme = Scheme(
        name="w",
        weights=WORLD,
        grads=WORLD,
        optim=WORLD,
        forward_gather=wire,
        grad_reduce=wire,
        block_size=BLOCK,
    )
    ledger = Ledger()
    axis, meter = Topology(inner).along("data"), MemoryMeter()
    return Collectives(scheme, axis, ledger, meter, torch.device("cpu"), Options(overlap=False)), ledger


def gather(wire: str, inner: dict[str, int]):
    messages, ledger = collectives(wire, inner)
    axis = messages.axis
    out = torch.full((SHARD * axis.levels.world,), torch.nan)
    shard = values_of(axis.rank, SHARD)
    messages.submit(
        "unit",
        messages.inwards(SELF, WORLD),
        lambda call: messages.gather(call, shard, out, SELF, WORLD, "forward_gather"),
    )
    return out, ledger.take()


def reduce(wire: str, inner: dict[str, int]):
    messages, ledger = collectives(wire, inner)
    axis = messages.axis
    full = values_of(axis.rank, SHARD * axis.levels.world)
    found = []

    def work(call):
        found.append((yield from messages.reduce_scatter(call, full, SELF, WORLD, "grad_reduce")))

    messages.submit("unit", messages.levels_of_reduction(GRAD_REDUCE, torch.float32), work)
    return found[0], ledger.take()


@pytest.mark.parametrize("wire", ["native", "bf16", "int8", "int4"])
@pytest.mark.parametrize(("ranks", "inner"), CASES)
def test_gather(ranks: int, inner: dict[str, int], wire: str) -> None:
    levels = Levels.fit(inner, ranks)
    # The innermost coordinate is the most significant: shards lie in the order of the reversed digits.
    order = sorted(range(ranks), key=lambda rank: [hop.coordinate(rank) for hop in levels.hops(SELF, WORLD)])
    expected = torch.cat([through(values_of(rank, SHARD), wire) for rank in order])
    for out, sent in on_ranks(ranks, gather, wire, inner):
        assert torch.equal(out, expected)
        message = message_bytes(SHARD, wire, "fp32", BLOCK)
        assert sum(s.bytes for s in sent) == (ranks - 1) * message
        assert {s.wire for s in sent} == {wire}


@pytest.mark.parametrize("wire", ["native", "bf16", "int8", "int4"])
@pytest.mark.parametrize(("ranks", "inner"), CASES)
def test_reduce_scatter(ranks: int, inner: dict[str, int], wire: str) -> None:
    """Each hop sends its own sums: encoded once per hop, summed in fp32 in the order of the partners."""
    levels = Levels.fit(inner, ranks)
    held = [values_of(rank, SHARD * ranks) for rank in range(ranks)]
    for hop in levels.hops(SELF, WORLD):
        before, held = held, []
        for rank in range(ranks):
            parts = [before[other].chunk(hop.count)[hop.coordinate(rank)] for other in hop.partners(rank)]
            total = through(parts[0], wire).clone()
            for part in parts[1:]:
                total += through(part, wire)
            held.append(total)
    for expected, (out, sent) in zip(held, on_ranks(ranks, reduce, wire, inner), strict=True):
        assert torch.equal(out, expected)
        size, bytes_sent = SHARD * ranks, 0
        for hop in levels.hops(SELF, WORLD):
            size //= hop.count
            bytes_sent += (hop.count - 1) * message_bytes(size, wire, "fp32", BLOCK)
        assert sum(s.bytes for s in sent) == bytes_sent


@pytest.mark.parametrize("block", [1, 7, 24, 256])
@pytest.mark.parametrize("wire", ["int8", "int4"])
def test_pieces_give_the_same_bytes(monkeypatch, wire: str, block: int) -> None:
    """Large messages are quantized a piece at a time: blocks and packed codes lie where they would."""
    values = torch.stack([values_of(rank, 328) for rank in range(3)])
    whole = encode(values, wire, block)
    expected = dequantize(*quantize(values, WIRE_BITS[wire], block), WIRE_BITS[wire], block)
    monkeypatch.setattr("lowband.engine.collectives.wire.AT_ONCE", 100)
    used = 328 * WIRE_BITS[wire] // 8 + 4 * -(-328 // block)  # what follows is padding
    assert torch.equal(encode(values, wire, block)[:, :used], whole[:, :used])
    out = torch.full((3, 328), torch.nan)
    decode(whole, out, wire, block)
    assert torch.equal(out, expected)
    total = torch.full((328,), torch.nan)
    decode_sum(whole, total, wire, block)
    assert torch.equal(total, expected[0] + expected[1] + expected[2])
    for parts in (1, 41):
        again = sum_encode(whole, 328, parts, torch.float32, wire, block)
        used = 328 // parts * WIRE_BITS[wire] // 8 + 4 * -(-328 // parts // block)
        assert torch.equal(again[:, :used], encode(total.view(parts, -1), wire, block)[:, :used])


def test_volume_of_a_wire() -> None:
    """4 bits are an eighth of fp32, 8 bits a quarter; scales add 4 bytes a block, padding less than 16."""
    assert message_bytes(1024, "int4", "fp32", 256) == 1024 // 2 + 4 * 4
    assert message_bytes(1024, "int8", "fp32", 1000) == 1024 + 2 * 4 + 8
    assert {name: message_bytes(64, name, "bf16", 1) // 64 for name in DTYPE_BYTES} == DTYPE_BYTES


@pytest.mark.parametrize("blocks", [1, 2, 3, 4, 4609])
@pytest.mark.parametrize("wire", ["int8", "int4"])
def test_every_message_starts_where_vector_loads_may(wire: str, blocks: int) -> None:
    """Else our kernels, and NCCL's copies of the rows, move single bytes."""
    messages = encode(torch.ones(3, 256 * blocks), wire, 256)
    assert messages.shape == (3, message_bytes(256 * blocks, wire, "fp32", 256))
    assert messages.is_contiguous()
    assert messages.stride(0) % MESSAGE_ALIGN == 0
