"""Symmetric block quantization to 8 or 4 bits, as ZeRO++ sends weights and gradients (arXiv 2306.10209).

The largest magnitude of each block of values is mapped to qmax = 2^(bits - 1) - 1:

    scale = max |x| / qmax      q = round_half_even(x / scale)      x' = q scale

so |x - x'| <= scale / 2 for every value, up to fp32 rounding. (DeepSpeed 0.19's scale is
max |x| / 2^(bits - 1), which clips the largest value by one step.) Special cases:

- a block whose scale is not a normal fp32 number (zeros, denormals) is sent as zeros: its error is below
  qmax x 1.2e-38;
- a block with an infinity or a NaN decodes to NaN everywhere, so that a diverged run cannot look healthy.

Two 4-bit values share a byte, the earlier one in the low half.

This is the reference. On a GPU `engine.collectives.wire` writes, reads and sums whole messages with the
kernels of `block_quant_triton`, which produce the same bytes.
"""

from types import ModuleType

import torch

from lowband.kernels.device import runs_triton
from lowband.spec.wire import QMAX

_SMALLEST_NORMAL = torch.finfo(torch.float32).tiny


def quantize(values: torch.Tensor, bits: int, block: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes and scales of each row's blocks.

    values: [rows, n] floating point; n even for 4 bits; the last block of a row may be shorter
    bits:   8 or 4
    block:  values per scale
    Returns codes [rows, n] int8 or [rows, n / 2] uint8 (packed), and scales [rows, ceil(n / block)] fp32.
    """
    rows, n = values.shape
    blocks = -(-n // block)
    x = values.float()
    if blocks * block != n:
        x = torch.nn.functional.pad(x, (0, blocks * block - n))
    x = x.view(rows, blocks, block)
    scales = x.abs().amax(-1) / QMAX[bits]
    scales = scales.masked_fill(scales < _SMALLEST_NORMAL, 0.0)  # a NaN stays a NaN
    codes = (x / scales.unsqueeze(-1)).round_().nan_to_num_(0.0, 0.0, 0.0)  # x / 0: the scale makes them 0
    codes = codes.view(rows, -1)[:, :n].to(torch.int8)
    if bits == 8:
        return codes.contiguous(), scales
    nibbles = codes.view(torch.uint8) & 0xF
    return nibbles[:, 0::2] | (nibbles[:, 1::2] << 4), scales


def dequantize(codes: torch.Tensor, scales: torch.Tensor, bits: int, block: int) -> torch.Tensor:
    """Values [rows, n] fp32 from the codes and scales that `quantize` returns."""
    rows = codes.shape[0]
    if bits == 4:
        low = (codes << 4).view(torch.int8) >> 4  # the shift back is arithmetic: it extends the sign
        high = codes.view(torch.int8) >> 4
        codes = torch.stack((low, high), dim=-1).view(rows, -1)
    n, blocks = codes.shape[1], scales.shape[1]
    if blocks * block == n:
        return (codes.view(rows, blocks, block) * scales.unsqueeze(-1)).view(rows, n)
    return codes * scales.repeat_interleave(block, dim=1)[:, :n]


def fast_path(device: torch.device, block: int) -> ModuleType | None:
    """The module of kernels for messages on this device in blocks of this length, or None."""
    if not runs_triton(device):
        return None
    from lowband.kernels import block_quant_triton

    return block_quant_triton if block_quant_triton.takes(block) else None
