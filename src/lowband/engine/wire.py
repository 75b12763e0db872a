"""Tensors into messages and back, in a wire's format."""

import torch

from lowband.kernels.block_quant import dequantize, quantize
from lowband.spec.wire import WIRE_BITS, Wire

_CAST = {"fp32": torch.float32, "bf16": torch.bfloat16}


def is_plain(wire: Wire, dtype: torch.dtype) -> bool:
    """Whether a tensor of this dtype travels as it is."""
    return wire == "native" or _CAST.get(wire) == dtype


def encode(values: torch.Tensor, wire: Wire, block_size: int) -> torch.Tensor:
    """One message per row.

    values: [rows, n] floating point, n a multiple of 8
    Returns [rows, message length], contiguous: the wire's dtype, or bytes (codes, then scales).
    """
    if wire in _CAST:
        return values.to(_CAST[wire])
    codes, scales = quantize(values, WIRE_BITS[wire], block_size)
    return torch.cat((codes.view(torch.uint8), scales.view(torch.uint8)), dim=1)


def decode(messages: torch.Tensor, n: int, wire: Wire, block_size: int) -> torch.Tensor:
    """[rows, n] fp32 from one message per row."""
    if wire in _CAST:
        return messages.float()
    bits = WIRE_BITS[wire]
    code_bytes = n * bits // 8
    codes = messages[:, :code_bytes]
    scales = messages[:, code_bytes:].contiguous().view(torch.float32)
    return dequantize(codes.view(torch.int8) if bits == 8 else codes, scales, bits, block_size)
