"""DeepSpeed's quantizer in torch, for CPUs, where DeepSpeed has none; rows made with it are marked `shimmed`.

It follows the CUDA kernels (csrc/quantization of DeepSpeed 0.19.8): symmetric, one scale per group; the scale
for b bits is 2^b / (2 max), so the largest positive value is clipped to (2^(b-1) - 1) / 2^(b-1) of itself;
two INT4 values share a byte, the first in the low half.
"""

from typing import Any

import torch


class Quantizer:
    """The four functions of DeepSpeed's quantizer module that ZeRO++ calls."""

    Symmetric, Asymmetric = 0, 1

    @staticmethod
    def quantize(x: torch.Tensor, groups: int, bits: int, _kind: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Codes int8 in x's shape, with the last dimension halved for 4 bits; scales fp32 [groups]."""
        codes, scales = _encode(x.reshape(groups, -1), bits)
        return codes.reshape(*x.shape[:-1], -1), scales

    @staticmethod
    def dequantize(
        codes: torch.Tensor, scales: torch.Tensor, groups: int, bits: int, _kind: int
    ) -> torch.Tensor:
        """Values in fp16, as the CUDA kernel returns them."""
        values = _decode(codes.reshape(groups, -1), scales, bits)
        return values.reshape(*codes.shape[:-1], -1).half()

    @staticmethod
    def swizzle_quant(
        x: torch.Tensor, groups: int, bits: int, _kind: int, _pipeline: int, nodes: int, ranks_per_node: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Quantize, and order codes and scales for the first hop: by rank in the node, then by node."""
        codes, scales = _encode(x.reshape(groups, -1), bits)

        def swizzled(parts: torch.Tensor) -> torch.Tensor:
            return parts.reshape(nodes, ranks_per_node, -1).transpose(0, 1).reshape(-1).contiguous()

        return swizzled(codes), swizzled(scales)

    @staticmethod
    def quantized_reduction(
        codes: torch.Tensor,
        scales: torch.Tensor,
        groups_in: int,
        groups_out: int,
        bits: int,
        _kind: int,
        ranks_per_node: int,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Sum over the ranks of a node, and quantize the sums for the second hop."""
        values = _decode(codes.reshape(groups_in, -1), scales, bits)
        codes, scales = _encode(values.reshape(ranks_per_node, -1).sum(0).reshape(groups_out, -1), bits)
        return codes.reshape(-1), scales


def _encode(x: torch.Tensor, bits: int) -> tuple[torch.Tensor, torch.Tensor]:
    """x [groups, n] -> codes int8 [groups, n], for 4 bits packed [groups, n/2]; scales fp32 [groups]."""
    x = x.float()
    largest = x.abs().amax(1, keepdim=True)
    rate = torch.where(largest == 0, torch.ones_like(largest), 2.0**bits / (2 * largest))
    codes = (x * rate).round().clamp(-(2 ** (bits - 1)), 2 ** (bits - 1) - 1).to(torch.int8)
    if bits == 4:
        low, high = codes.view(codes.shape[0], -1, 2).unbind(-1)
        codes = (low & 0xF) | (high << 4)
    return codes, (1 / rate).reshape(-1)


def _decode(codes: torch.Tensor, scales: torch.Tensor, bits: int) -> torch.Tensor:
    """codes [groups, ...] -> fp32 [groups, n]."""
    if bits == 4:
        codes = torch.stack(((codes << 4) >> 4, codes >> 4), -1).flatten(1)
    return codes.float() * scales.reshape(-1, 1)


class _Builder:
    """The op builder from which DeepSpeed loads its quantizer module."""

    def load(self, verbose: bool = True) -> Any:
        return Quantizer


def install() -> None:
    """Replace DeepSpeed's quantizer with this one, in this process."""
    import deepspeed.ops.op_builder as builders

    builders.QuantizerBuilder = _Builder
