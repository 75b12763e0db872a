"""Tensors into messages and back, in a wire's format."""

import math
from collections.abc import Iterator

import torch

from lowband.kernels.block_quant import dequantize, quantize
from lowband.spec.wire import SCALE_BYTES, WIRE_BITS, Wire

_CAST = {"fp32": torch.float32, "bf16": torch.bfloat16}
AT_ONCE = 2**24  # values; quantizing takes up to 16 bytes for each of them


def is_plain(wire: Wire, dtype: torch.dtype) -> bool:
    """Whether a tensor of this dtype travels as it is: a cast to its own dtype is no cast."""
    return wire == "native" or _CAST.get(wire) == dtype


def encode(values: torch.Tensor, wire: Wire, block_size: int) -> torch.Tensor:
    """One message per row.

    values: [rows, n] floating point, n a multiple of 8
    Returns [rows, message length], contiguous: the wire's dtype, or bytes (codes, then scales).
    """
    if wire in _CAST:
        return values.to(_CAST[wire])
    rows, n = values.shape
    bits = WIRE_BITS[wire]
    length = n * bits // 8 + SCALE_BYTES * -(-n // block_size)
    messages = values.new_empty(rows, length, dtype=torch.uint8)
    for (start, stop), codes_at, scales_at in _pieces(rows, n, bits, block_size):
        codes, scales = quantize(values[:, start:stop], bits, block_size)
        messages[:, codes_at] = codes.view(torch.uint8)
        messages.view(torch.float32)[:, scales_at] = scales
    return messages


def decode(
    messages: torch.Tensor, out: torch.Tensor, wire: Wire, block_size: int, is_added: bool = False
) -> None:
    """Fill `out`, [rows, n] floating point, from one message per row, or add the values to it."""

    def put(place: torch.Tensor, values: torch.Tensor) -> None:
        place.add_(values) if is_added else place.copy_(values)

    if wire in _CAST:
        put(out, messages)
        return
    bits = WIRE_BITS[wire]
    for (start, stop), codes_at, scales_at in _pieces(*out.shape, bits, block_size):
        codes, scales = messages[:, codes_at], messages.view(torch.float32)[:, scales_at]
        codes = codes.view(torch.int8) if bits == 8 else codes
        put(out[:, start:stop], dequantize(codes, scales, bits, block_size))


def _pieces(rows: int, n: int, bits: int, block_size: int) -> Iterator[tuple[tuple[int, int], slice, slice]]:
    """Ranges of columns that hold whole blocks, AT_ONCE values together or one block a row.

    Yields a range and its places in a message: of the codes, in bytes, and of the scales, in fp32 words.
    """
    whole = math.lcm(block_size, 2)  # two codes of 4 bits share a byte
    step = max(1, AT_ONCE // (rows * whole)) * whole
    first_scale = n * bits // 32
    for start in range(0, n, step):
        stop = min(start + step, n)
        codes = slice(start * bits // 8, stop * bits // 8)
        scales = slice(first_scale + start // block_size, first_scale + -(-stop // block_size))
        yield (start, stop), codes, scales
