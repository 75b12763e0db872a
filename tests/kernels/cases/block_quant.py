"""Messages written, read and summed by the kernels equal the reference's on the CPU, bit by bit."""

import pytest
import torch
from common import BF16

from lowband.engine.collectives import wire as wires
from lowband.kernels import block_quant
from lowband.kernels import block_quant_triton as fast
from lowband.kernels.block_quant import dequantize, quantize
from lowband.spec.wire import WIRE_BITS, quantized_bytes

INF, NAN = float("inf"), float("nan")
name_of = {"ids": str}


def reference_encode(values: torch.Tensor, bits: int, block: int) -> torch.Tensor:
    codes, scales = quantize(values, bits, block)
    return torch.cat((codes.view(torch.uint8), scales.view(torch.uint8)), dim=1)


def reference_decode(messages: torch.Tensor, n: int, bits: int, block: int) -> torch.Tensor:
    codes, scales = messages[:, : n * bits // 8], messages[:, n * bits // 8 :].contiguous()
    codes = codes.contiguous().view(torch.int8) if bits == 8 else codes
    return dequantize(codes, scales.view(torch.float32), bits, block)


def some_values(rows: int, n: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    magnitude = 10.0 ** torch.randint(-4, 4, (rows, n), generator=generator)
    return (torch.randn(rows, n, generator=generator) * magnitude).to(dtype)


def same(message: torch.Tensor, expected: torch.Tensor, codes: int) -> bool:
    """Equal bytes, but for the message's padding; among scales a NaN equals a NaN."""
    found = message.cpu()[:, : expected.shape[1]]
    scales, expected_scales = (m[:, codes:].contiguous().view(torch.float32) for m in (found, expected))
    return torch.equal(found[:, :codes], expected[:, :codes]) and bool(
        ((scales == expected_scales) | (scales.isnan() & expected_scales.isnan())).all()
    )


def poisoned(rows: int, n: int, bits: int, block: int, device: torch.device) -> torch.Tensor:
    """Messages not written yet."""
    return torch.full((rows, quantized_bytes(n, bits, block)), 0xA5, dtype=torch.uint8, device=device)


def is_untouched(messages: torch.Tensor, expected: torch.Tensor) -> bool:
    """Whether the padding of poisoned messages is as it was."""
    return bool((messages[:, expected.shape[1] :] == 0xA5).all())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], **name_of)
@pytest.mark.parametrize("block", [2, 24, 256, 1000])
@pytest.mark.parametrize(("rows", "n"), [(1, 8), (3, 328), (2, 5000), (3, 256 * 3)])
@pytest.mark.parametrize("bits", [8, 4])
def test_encode(device, bits: int, rows: int, n: int, block: int, dtype: torch.dtype) -> None:
    values = some_values(rows, n, dtype)
    expected = reference_encode(values, bits, block)
    messages = poisoned(rows, n, bits, block, device)
    fast.launch_encode(values.to(device), messages, bits, block)
    assert same(messages, expected, n * bits // 8)
    assert is_untouched(messages, expected)
    assert same(fast.encode(values.to(device), bits, block), expected, n * bits // 8)


@pytest.mark.parametrize("bits", [8, 4])
def test_encode_of_rows_apart(device, bits: int) -> None:
    """Columns of a wider tensor, and every second column."""
    values = some_values(3, 4000)
    for part in (values[:, 8:336], values[:, ::2]):
        whole = values.to(device)
        there = whole[:, 8:336] if part.stride(1) == 1 else whole[:, ::2]
        expected = reference_encode(part.contiguous(), bits, 256)
        assert same(fast.encode(there, bits, 256), expected, part.shape[1] * bits // 8)


@pytest.mark.parametrize("bits", [8, 4])
def test_ties_go_to_the_even(device, bits: int) -> None:
    """Every quotient k + 1/2 that a block can have: its largest value makes the scale 2."""
    top = 2 ** (bits - 1) - 1
    values = torch.arange(-top, top, dtype=torch.float32) * 2 + 1
    values = torch.cat((values, torch.full(((-len(values)) % 8 + 8,), 2.0 * top)))[None]
    block = values.shape[1]
    assert (quantize(values, bits, block)[1] == 2).all()
    assert same(
        fast.encode(values.to(device), bits, block),
        reference_encode(values, bits, block),
        block * bits // 8,
    )


@pytest.mark.parametrize("bits", [8, 4])
def test_quotients_beside_ties(device, bits: int) -> None:
    """Values at and one or two roundings beside (k + 1/2) x scale, for scales of every size."""
    top, block = 2 ** (bits - 1) - 1, 256
    generator = torch.Generator().manual_seed(3)
    exponents = torch.arange(-126, 127 - bits)
    largest = torch.ldexp(1 + torch.rand(len(exponents), generator=generator), exponents) * top
    half = torch.randint(-top, top, (len(largest), block), generator=generator) + 0.5
    values = ((largest / top)[:, None].double() * half).float()
    steps = torch.randint(-2, 3, values.shape, generator=generator, dtype=torch.int32)
    values = (values.view(torch.int32) + steps).view(torch.float32)
    values = values.clamp(-largest[:, None], largest[:, None])
    values[:, 0] = largest
    expected = reference_encode(values, bits, block)
    assert same(fast.encode(values.to(device), bits, block), expected, block * bits // 8)


@pytest.mark.parametrize("odd", [0.0, -0.0, 1e-45, -1e-39, 1.1e-38, 1.6e-36, 3.4e38, INF, -INF, NAN])
@pytest.mark.parametrize("bits", [8, 4])
def test_odd_values(device, bits: int, odd: float) -> None:
    values = torch.ones(2, 48)
    values[0, 5], values[1] = odd, odd
    expected = reference_encode(values, bits, 16)
    messages = fast.encode(values.to(device), bits, 16)
    assert same(messages, expected, 48 * bits // 8)
    out = torch.full((2, 48), 7.0, device=device)
    fast.decode(messages, out, bits, 16)
    torch.testing.assert_close(
        out.cpu(), reference_decode(expected, 48, bits, 16), rtol=0, atol=0, equal_nan=True
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, BF16], **name_of)
@pytest.mark.parametrize("block", [24, 256])
@pytest.mark.parametrize(("rows", "n"), [(1, 8), (3, 328), (2, 5000), (3, 256 * 3)])
@pytest.mark.parametrize("bits", [8, 4])
def test_decode(device, bits: int, rows: int, n: int, block: int, dtype: torch.dtype) -> None:
    messages = reference_encode(some_values(rows, n) * 1e-3, bits, block)
    wide = torch.full((rows, n + 3), NAN, dtype=dtype, device=device)
    fast.decode(messages.to(device), wide[:, :n], bits, block)
    assert torch.equal(wide[:, :n].cpu(), reference_decode(messages, n, bits, block).to(dtype))
    assert wide[:, n:].isnan().all()


@pytest.mark.parametrize("block", [24, 256])
@pytest.mark.parametrize(("partners", "n"), [(1, 8), (2, 328), (7, 5000)])
@pytest.mark.parametrize("bits", [8, 4])
def test_sum(device, bits: int, partners: int, n: int, block: int) -> None:
    """The sums are those of a loop over the partners, not of a tree, and no product is fused into them."""
    messages = reference_encode(some_values(partners, n), bits, block)
    values = reference_decode(messages, n, bits, block)
    total = values[0].clone()
    for row in values[1:]:
        total += row
    out = torch.full((n,), NAN, device=device)
    fast.decode_sum(messages.to(device), out, bits, block)
    assert torch.equal(out.cpu(), total)


@pytest.mark.parametrize("dtype", [torch.float32, BF16], **name_of)
@pytest.mark.parametrize(
    ("partners", "parts", "blocks", "block"), [(2, 2, 1, 8), (4, 2, 5, 24), (3, 4, 17, 256)]
)
@pytest.mark.parametrize("bits", [8, 4])
def test_sum_encode(device, bits, partners, parts, blocks, block, dtype) -> None:
    n = parts * blocks * block
    messages = reference_encode(some_values(partners, n), bits, block)
    total = torch.zeros(n)
    for row in reference_decode(messages, n, bits, block):
        total += row
    expected = reference_encode(total.to(dtype).view(parts, -1), bits, block)
    out = poisoned(parts, n // parts, bits, block, device)
    fast.launch_sum_encode(messages.to(device), out, n, dtype, bits, block)
    assert same(out, expected, n // parts * bits // 8)
    assert is_untouched(out, expected)


@pytest.mark.parametrize("n", [2048, 256 * 4 * 5])
@pytest.mark.parametrize("wire", WIRE_BITS)
def test_the_engine_takes_the_fast_path(device, monkeypatch, wire: str, n: int) -> None:
    """The calls that collectives make, with the reference out of reach; also for an odd number of blocks."""
    bits, block = WIRE_BITS[wire], 256
    values = some_values(4, n)
    expected = reference_encode(values, bits, block)
    decoded = reference_decode(expected, n, bits, block)
    for name in ("quantize", "dequantize"):
        monkeypatch.setattr(wires, name, None)
    messages = wires.encode(values.to(device), wire, block)
    assert same(messages, expected, n * bits // 8)
    out = torch.full((4, n), NAN, device=device)
    wires.decode(messages, out, wire, block)
    assert torch.equal(out.cpu(), decoded)
    wires.decode_sum(messages, out[0], wire, block)
    assert torch.equal(out[0].cpu(), decoded[0] + decoded[1] + decoded[2] + decoded[3])
    again = wires.sum_encode(messages, n, 4, torch.float32, wire, block)
    assert same(again, reference_encode(out[0].cpu().view(4, -1), bits, block), n // 4 * bits // 8)


@pytest.mark.parametrize("block", [7, 16384])
def test_other_blocks_go_by_the_reference(device, block: int) -> None:
    assert block_quant.fast_path(device, block) is None
    values = some_values(1, 328).to(device)
    out = torch.full((1, 328), NAN, device=device)
    wires.decode(wires.encode(values, "int4", block), out, "int4", block)
    assert (out - values).abs().max() <= values.abs().max() / 7
