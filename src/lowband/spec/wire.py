"""Formats in which a collective's bytes travel, and how many they are."""

from typing import Literal

Wire = Literal["native", "fp32", "bf16", "int8", "int4"]

DTYPE_BYTES = {"fp32": 4, "bf16": 2}
WIRE_BITS = {"int8": 8, "int4": 4}
QMAX = {bits: 2 ** (bits - 1) - 1 for bits in WIRE_BITS.values()}
SCALE_BYTES = 4  # one fp32 scale per block


def message_bytes(numel: int, wire: Wire, native_dtype: str, block_size: int) -> int:
    """Bytes of one message of `numel` values (even, as the engine cuts them), scales included.

    native_dtype: what `native` stands for here
    block_size:   values per scale of the quantized wires
    """
    if wire in WIRE_BITS:
        return numel * WIRE_BITS[wire] // 8 + SCALE_BYTES * -(-numel // block_size)
    return numel * DTYPE_BYTES[native_dtype if wire == "native" else wire]
