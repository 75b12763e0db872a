"""Conversion of tensors to messages in a wire's format, and back.

Quantized messages are made by a kernel on a GPU and in pieces by torch elsewhere; the bytes are the same.
"""

import math
from collections.abc import Iterator
from functools import cache

import torch
from torch._subclasses.fake_tensor import FakeTensor

from lowband.kernels.block_quant import dequantize, fast_path, quantize
from lowband.spec import wire as spec
from lowband.spec.wire import WIRE_BITS, Wire, quantized_bytes

TORCH_DTYPE = {"fp32": torch.float32, "bf16": torch.bfloat16}
_NAME = {dtype: name for name, dtype in TORCH_DTYPE.items()}
AT_ONCE = 2**24  # values; quantizing takes up to 16 bytes for each of them


def name_of(dtype: torch.dtype) -> str:
    """A dtype's name in schemes; empty for one that no wire has."""
    return _NAME.get(dtype, "")


@cache
def is_plain(wire: Wire, dtype: torch.dtype) -> bool:
    """Whether a tensor of this dtype is sent unchanged."""
    return spec.is_plain(wire, name_of(dtype))


def encode(values: torch.Tensor, wire: Wire, block_size: int) -> torch.Tensor:
    """Encode each row as one message.

    values: [rows, n] floating point, n a multiple of 8
    Returns [rows, message length], contiguous: the wire's dtype, or bytes (codes, scales, unwritten padding).
    """
    if wire in TORCH_DTYPE:
        return values.to(TORCH_DTYPE[wire])
    rows, n = values.shape
    bits = WIRE_BITS[wire]
    if (kernels := fast_path(values.device, block_size)) is not None:
        return kernels.encode(values, bits, block_size)
    messages = values.new_empty(rows, quantized_bytes(n, bits, block_size), dtype=torch.uint8)
    for (start, stop), codes_at, scales_at in _pieces(values, n, bits, block_size):
        codes, scales = quantize(values[:, start:stop], bits, block_size)
        messages[:, codes_at] = codes.view(torch.uint8)
        messages.view(torch.float32)[:, scales_at] = scales
    return messages


def decode(messages: torch.Tensor, out: torch.Tensor, wire: Wire, block_size: int) -> None:
    """Fill `out`, [rows, n] floating point, from one message per row."""
    if wire in TORCH_DTYPE:
        out.copy_(messages)
    elif (kernels := fast_path(messages.device, block_size)) is not None:
        kernels.decode(messages, out, WIRE_BITS[wire], block_size)
    else:
        for columns, values in _decoded(messages, out.shape[1], wire, block_size):
            out[:, columns] = values


def decode_sum(messages: torch.Tensor, out: torch.Tensor, wire: Wire, block_size: int) -> None:
    """Fill `out`, [n] fp32, with the sum of messages [partners, length], in the order of the partners."""
    if wire in WIRE_BITS and (kernels := fast_path(messages.device, block_size)) is not None:
        kernels.decode_sum(messages, out, WIRE_BITS[wire], block_size)
        return
    decode(messages[:1], out.view(1, -1), wire, block_size)
    for i in range(1, len(messages)):
        if wire in TORCH_DTYPE:
            out += messages[i]
        else:
            for columns, values in _decoded(messages[i : i + 1], len(out), wire, block_size):
                out[columns] += values[0]


def sum_encode(
    messages: torch.Tensor, n: int, parts: int, dtype: torch.dtype, wire: Wire, block_size: int
) -> torch.Tensor:
    """The sum of messages [partners, length] of n values, rounded to `dtype`, as one message per part."""
    if wire in WIRE_BITS and n % (parts * block_size) == 0:
        kernels = fast_path(messages.device, block_size)
        if kernels is not None:
            return kernels.sum_encode(messages, n, parts, dtype, WIRE_BITS[wire], block_size)
    total = torch.empty(n, dtype=torch.float32, device=messages.device)
    decode_sum(messages, total, wire, block_size)
    return encode(total.to(dtype).view(parts, -1), wire, block_size)


def _decoded(
    messages: torch.Tensor, n: int, wire: Wire, block_size: int
) -> Iterator[tuple[slice, torch.Tensor]]:
    """Decode messages of n values piece by piece: yields columns and their values [rows, columns] fp32."""
    bits = WIRE_BITS[wire]
    for (start, stop), codes_at, scales_at in _pieces(messages, n, bits, block_size):
        codes, scales = messages[:, codes_at], messages.view(torch.float32)[:, scales_at]
        codes = codes.view(torch.int8) if bits == 8 else codes
        yield slice(start, stop), dequantize(codes, scales, bits, block_size)


def _pieces(
    tensor: torch.Tensor, n: int, bits: int, block_size: int
) -> Iterator[tuple[tuple[int, int], slice, slice]]:
    """Ranges of columns of whole blocks, with AT_ONCE values in all rows together or one block per row.

    tensor: one row per message of n values; a fake tensor yields no range, as there is nothing to compute
    Yields a range and its places in a message: that of the codes, in bytes, and of the scales, in fp32 words.
    """
    if isinstance(tensor, FakeTensor):
        return
    rows = len(tensor)
    whole = math.lcm(block_size, 2)  # two codes of 4 bits share a byte
    step = max(1, AT_ONCE // (rows * whole)) * whole
    first_scale = n * bits // 32
    for start in range(0, n, step):
        stop = min(start + step, n)
        codes = slice(start * bits // 8, stop * bits // 8)
        scales = slice(first_scale + start // block_size, first_scale + -(-stop // block_size))
        yield (start, stop), codes, scales
