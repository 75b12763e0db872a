"""The formats in which a collective's values travel, and the size of a message in each."""

from typing import Literal

Wire = Literal["native", "fp32", "bf16", "int8", "int4"]

DTYPE_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}
WIRE_BITS = {"int8": 8, "int4": 4}
QMAX = {bits: 2 ** (bits - 1) - 1 for bits in WIRE_BITS.values()}
SCALE_BYTES = 4  # one fp32 scale per block

# Quantized messages are concatenated in one buffer. Each starts at a multiple of this: our kernels and NCCL
# move 16 bytes at once only if every address is so aligned, and single bytes otherwise.
MESSAGE_ALIGN = 16


def is_plain(wire: Wire, native_dtype: str) -> bool:
    """Whether values travel unchanged; a wire of the native dtype counts as unchanged."""
    return wire in ("native", native_dtype)


def message_bytes(numel: int, wire: Wire, native_dtype: str, block_size: int) -> int:
    """Bytes of one message of `numel` values (even, as the engine cuts them), scales included.

    native_dtype: the dtype that `native` stands for
    block_size:   values per scale of the quantized wires
    """
    if wire in WIRE_BITS:
        return quantized_bytes(numel, WIRE_BITS[wire], block_size)
    return numel * DTYPE_BYTES[native_dtype if wire == "native" else wire]


def quantized_bytes(numel: int, bits: int, block_size: int) -> int:
    """Bytes of a message: codes, then scales, then unused padding."""
    used = numel * bits // 8 + SCALE_BYTES * -(-numel // block_size)
    return -(-used // MESSAGE_ALIGN) * MESSAGE_ALIGN
