"""Block quantization on a GPU: messages are written, read, summed and rewritten in one pass each.

A message, as `engine.collectives.wire` sends it, is the codes of n values, then the fp32 scale of each of
their blocks, then padding that is neither written nor read (`spec.wire`).

[Note: the same bits] The results equal those of `block_quant` on the CPU, bit by bit. So divisions round to
nearest (Triton's `/` is approximate), products are not fused with sums (enable_fp_fusion), and a block's
largest magnitude is found by comparing bit patterns as integers: they are ordered as the magnitudes are, with
infinity above every number and NaN above infinity, whereas a floating-point maximum may drop a NaN.

[Note: few instructions] These kernels reach the memory's rate only if they take few instructions a value. A
block has one divisor, so its values are divided by multiply-adds (Markstein, IBM Journal 34(1), 1990): with
r = 1/d rounded to nearest, two corrections q += (x - q d) r give x / d rounded to nearest. Both are scaled by
a power of two to d in [1, 2), so that no remainder underflows that a code depends on. Conversions between
integers and floats run at half the rate of other instructions: small integers are moved through the low bits
of a float of 2^23 or 1.5 x 2^23 instead.
"""

from collections.abc import Iterator

import torch
import triton
import triton.language as tl

from lowband.kernels.device import on_its_device
from lowband.kernels.variant import Variant
from lowband.spec.wire import QMAX, quantized_bytes

TILE_BYTES = 2048  # of codes, per program
LARGEST_BLOCK = 8192
TL_DTYPE = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}

_MAGNITUDE = tl.constexpr(0x7FFFFFFF)  # mask of an fp32's bits without the sign
_SMALLEST_NORMAL = tl.constexpr(torch.finfo(torch.float32).tiny)
_EXPONENT = tl.constexpr(0x7F800000)  # mask of its exponent
_ROUNDER = tl.constexpr(1.5 * 2.0**23)  # added to |x| < 2^22, rounds it half to even into the low bits
_INTEGERS = tl.constexpr(0x4B000000)  # bits of 2^23, to which the low bits add an integer


def takes(block: int) -> bool:
    """Whether blocks of this length are supported: no byte of two 4-bit codes may span two blocks."""
    return block % 2 == 0 and block <= LARGEST_BLOCK


def encode(values: torch.Tensor, bits: int, block: int) -> torch.Tensor:
    """One message per row, [rows, length] bytes, from values [rows, n], n a multiple of 8."""
    rows, n = values.shape
    values = values if values.stride(1) == 1 else values.contiguous()
    messages = _messages(rows, n, bits, block, values.device)
    launch_encode(values, messages, bits, block)
    return messages


@on_its_device
def launch_encode(values: torch.Tensor, messages: torch.Tensor, bits: int, block: int) -> None:
    rows, n = values.shape
    _encode[_grid(n, rows, bits, block)](
        values, messages, messages.view(torch.float32), n, values.stride(0), messages.stride(0),
        **constants(bits, block), enable_fp_fusion=False,
    )  # fmt: skip


@on_its_device
def decode(messages: torch.Tensor, out: torch.Tensor, bits: int, block: int) -> None:
    """Fill `out`, [rows, n] floating point, from messages [rows, length]."""
    rows, n = out.shape
    _decode[_grid(n, rows, bits, block)](
        messages, messages.view(torch.float32), out, n, 1, 0, messages.stride(0), out.stride(0),
        **constants(bits, block), enable_fp_fusion=False,
    )  # fmt: skip


@on_its_device
def decode_sum(messages: torch.Tensor, out: torch.Tensor, bits: int, block: int) -> None:
    """Fill `out`, [n] fp32, with the sum of messages [partners, length], in their order."""
    n = out.shape[0]
    _decode[_grid(n, 1, bits, block)](
        messages, messages.view(torch.float32), out, n, len(messages), messages.stride(0), 0, 0,
        **constants(bits, block), enable_fp_fusion=False,
    )  # fmt: skip


def sum_encode(
    messages: torch.Tensor, n: int, parts: int, dtype: torch.dtype, bits: int, block: int
) -> torch.Tensor:
    """Sum messages [partners, length] of n values, round to `dtype`, return as messages [parts, length'].

    n: parts x a multiple of `block`, so that no block of the sum spans two parts
    """
    out = _messages(parts, n // parts, bits, block, messages.device)
    launch_sum_encode(messages, out, n, dtype, bits, block)
    return out


@on_its_device
def launch_sum_encode(
    messages: torch.Tensor, out: torch.Tensor, n: int, dtype: torch.dtype, bits: int, block: int
) -> None:
    parts = len(out)
    _sum_encode[_grid(n // parts, parts, bits, block)](
        messages, messages.view(torch.float32), out, out.view(torch.float32), n, n // parts, len(messages),
        messages.stride(0), out.stride(0), ROUND_TO=TL_DTYPE[dtype], **constants(bits, block),
        enable_fp_fusion=False,
    )  # fmt: skip


def _messages(rows: int, n: int, bits: int, block: int, device: torch.device) -> torch.Tensor:
    return torch.empty(rows, quantized_bytes(n, bits, block), dtype=torch.uint8, device=device)


def constants(bits: int, block: int) -> dict[str, int]:
    """The kernels' compile-time constants."""
    width = triton.next_power_of_2(block)
    return {"BITS": bits, "BLOCK": block, "WIDTH": width, "GROUP": _group(bits, block), "QMAX": QMAX[bits]}


def _group(bits: int, block: int) -> int:
    """Blocks per program."""
    return max(1, TILE_BYTES * 8 // bits // triton.next_power_of_2(block))


def _grid(n: int, rows: int, bits: int, block: int) -> tuple[int, int]:
    return triton.cdiv(triton.cdiv(n, block), _group(bits, block)), rows


def variants(_device: str) -> Iterator[Variant]:
    """Every kernel, at both widths, with blocks of 256 values."""
    messages = {"messages": "*u8", "scales": "*fp32"}
    received = {"received": "*u8", "received_scales": "*fp32"}
    for bits in (8, 4):
        shared = constants(bits, 256)
        for kernel, function, pointers, more in (
            ("encode", _encode, {"values": "*bf16", **messages}, {}),
            ("decode", _decode, {"out": "*fp32", **messages}, {}),
            ("sum_encode", _sum_encode, {**messages, **received}, {"ROUND_TO": TL_DTYPE[torch.float32]}),
        ):
            yield Variant(
                f"block_quant.{kernel}", f"int{bits} block 256", function, pointers, {**shared, **more},
                {"num_warps": 4, "enable_fp_fusion": False}, aligned=("n", "part"),
            )  # fmt: skip


@triton.jit
def _encode(
    values,  # pointer to [rows, n] floating point
    messages,  # pointer to [rows, length] bytes
    scales,  # the same memory as fp32
    n,
    values_stride,
    message_stride,
    BITS: tl.constexpr,
    BLOCK: tl.constexpr,
    WIDTH: tl.constexpr,
    GROUP: tl.constexpr,
    QMAX: tl.constexpr,
):
    blocks, places, is_value = _tile(n, BLOCK, WIDTH, GROUP)
    row = tl.program_id(1).to(tl.int64)
    x = tl.load(values + row * values_stride + places, mask=is_value, other=0.0).to(tl.float32)
    _write(x, messages, scales, row * message_stride, n, blocks, BITS, BLOCK, WIDTH, GROUP, QMAX)


@triton.jit
def _decode(
    messages,  # pointer to messages; a row of the output is the sum of `partners` of them
    scales,
    out,  # pointer to [rows, n] floating point
    n,
    partners,
    partner_stride,
    row_stride,
    out_stride,
    BITS: tl.constexpr,
    BLOCK: tl.constexpr,
    WIDTH: tl.constexpr,
    GROUP: tl.constexpr,
    QMAX: tl.constexpr,
):
    blocks, places, is_value = _tile(n, BLOCK, WIDTH, GROUP)
    row = tl.program_id(1).to(tl.int64)
    total = _sum(
        messages, scales, row * row_stride, partner_stride, partners, n, blocks, BITS, BLOCK, WIDTH, GROUP
    )
    tl.store(out + row * out_stride + places, total.to(out.dtype.element_ty), mask=is_value)


@triton.jit
def _sum_encode(
    received,  # pointer to [partners, length] bytes, messages of n values
    received_scales,
    messages,  # pointer to [n / part, length'] bytes, messages of `part` values
    scales,
    n,
    part,
    partners,
    partner_stride,
    message_stride,
    BITS: tl.constexpr,
    BLOCK: tl.constexpr,
    WIDTH: tl.constexpr,
    GROUP: tl.constexpr,
    QMAX: tl.constexpr,
    ROUND_TO: tl.constexpr,
):
    blocks, _, is_value = _tile(part, BLOCK, WIDTH, GROUP)
    row = tl.program_id(1).to(tl.int64)
    first = row * (part // BLOCK)  # the row's first block among the blocks received
    # Blocks beyond this row's end belong to another row: they are read but not written.
    total = _sum(
        received, received_scales, row * 0, partner_stride, partners, n, first + blocks,
        BITS, BLOCK, WIDTH, GROUP,
    )  # fmt: skip
    total = tl.where(is_value, total.to(ROUND_TO).to(tl.float32), 0.0)
    _write(total, messages, scales, row * message_stride, part, blocks, BITS, BLOCK, WIDTH, GROUP, QMAX)


@triton.jit
def _tile(n, BLOCK: tl.constexpr, WIDTH: tl.constexpr, GROUP: tl.constexpr):
    """This program's blocks [GROUP], their values' places [GROUP, WIDTH], and which of these exist."""
    blocks = tl.program_id(0).to(tl.int64) * GROUP + tl.arange(0, GROUP)
    within = tl.arange(0, WIDTH)[None, :]
    places = blocks[:, None] * BLOCK + within
    return blocks, places, (within < BLOCK) & (places < n)


@triton.jit
def _bytes_of(blocks, n, BITS: tl.constexpr, BLOCK: tl.constexpr, WIDTH: tl.constexpr):
    """The places of these blocks' codes in a message, and which of them exist.

    n is divided first: n * BITS would not fit in 32 bits from 2^28 values on.
    """
    within = tl.arange(0, WIDTH * BITS // 8)[None, :]
    places = blocks[:, None] * (BLOCK * BITS // 8) + within
    return places, (within < BLOCK * BITS // 8) & (places < n // (8 // BITS))


@triton.jit
def _sum(
    messages,
    scales,
    first,  # bytes before the first message
    stride,  # bytes from a message to the next
    count,
    n,
    blocks,
    BITS: tl.constexpr,
    BLOCK: tl.constexpr,
    WIDTH: tl.constexpr,
    GROUP: tl.constexpr,
):
    """The values of these blocks summed over `count` messages in their order, [GROUP, WIDTH] fp32."""
    places, is_code = _bytes_of(blocks, n, BITS, BLOCK, WIDTH)
    scale_places = n // (32 // BITS) + blocks
    is_scale = blocks * BLOCK < n
    # A sum that begins with -0.0 is the first message itself.
    total = tl.full((GROUP, WIDTH), -0.0, tl.float32)
    for i in range(count):
        start = first + i * stride.to(tl.int64)
        codes = tl.load(messages + start + places, mask=is_code, other=0).to(tl.int32)
        scale = tl.load(scales + start // 4 + scale_places, mask=is_scale, other=0.0)
        if BITS == 4:
            codes = tl.reshape(tl.join(codes & 0xF, codes >> 4), (GROUP, WIDTH))
        # Flipping its sign bit adds 2^(BITS - 1) to a code in two's complement.
        shifted = (codes ^ (_INTEGERS + 2 ** (BITS - 1))).to(tl.float32, bitcast=True)
        total += (shifted - (2.0**23 + 2 ** (BITS - 1))) * scale[:, None]
    return total


@triton.jit
def _write(
    x,  # [GROUP, WIDTH] fp32, 0 where there is no value
    messages,
    scales,
    start,  # bytes before the message
    n,
    blocks,
    BITS: tl.constexpr,
    BLOCK: tl.constexpr,
    WIDTH: tl.constexpr,
    GROUP: tl.constexpr,
    QMAX: tl.constexpr,
):
    """Quantize these blocks into their message. See [Note: the same bits]."""
    magnitudes = x.to(tl.int32, bitcast=True) & _MAGNITUDE
    largest = tl.max(magnitudes, axis=1).to(tl.float32, bitcast=True)
    scale = tl.div_rn(largest, tl.full((GROUP,), QMAX, tl.float32))
    scale = tl.where(scale < _SMALLEST_NORMAL, 0.0, scale)  # a NaN stays a NaN
    is_usable = (scale > 0.0) & (scale < float("inf"))
    quotient = _quotient(x, tl.where(is_usable, scale, 1.0), GROUP, WIDTH)
    codes = (quotient + _ROUNDER).to(tl.int32, bitcast=True)
    codes = tl.where(is_usable[:, None], codes, 0)
    if BITS == 4:
        low, high = tl.split(tl.reshape(codes, (GROUP, WIDTH // 2, 2)))
        codes = (low & 0xF) | (high << 4)
    places, is_code = _bytes_of(blocks, n, BITS, BLOCK, WIDTH)
    tl.store(messages + start + places, codes.to(tl.uint8), mask=is_code)
    tl.store(scales + start // 4 + n // (32 // BITS) + blocks, scale, mask=blocks * BLOCK < n)


@triton.jit
def _quotient(x, divisor, GROUP: tl.constexpr, WIDTH: tl.constexpr):
    """x [GROUP, WIDTH] / divisor [GROUP] as a division rounds it, where it is not below 2^-20 in magnitude.

    divisor: normal, below 2^126. See [Note: few instructions].
    """
    exponent = divisor.to(tl.int32, bitcast=True) & _EXPONENT
    power = (0x7F000000 - exponent).to(tl.float32, bitcast=True)  # one over the power of two of that exponent
    divisor *= power
    reciprocal = tl.div_rn(tl.full((GROUP,), 1.0, tl.float32), divisor)
    x *= power[:, None]
    minus = tl.broadcast_to(-divisor[:, None], (GROUP, WIDTH))
    reciprocal = tl.broadcast_to(reciprocal[:, None], (GROUP, WIDTH))
    quotient = x * reciprocal
    quotient = tl.fma(tl.fma(quotient, minus, x), reciprocal, quotient)
    return tl.fma(tl.fma(quotient, minus, x), reciprocal, quotient)
