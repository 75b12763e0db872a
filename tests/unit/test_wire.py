"""Bytes of a message by hand: codes, one fp32 scale a block, padding to 16 bytes."""

import pytest

from lowband.spec.wire import QMAX, Wire, is_plain, message_bytes


@pytest.mark.parametrize(
    ("wire", "numel", "block_size", "expected"),
    [
        ("native", 10, 4, 20),
        ("bf16", 10, 4, 20),
        ("fp32", 10, 4, 40),
        ("int8", 1024, 256, 1024 + 4 * 4),
        ("int4", 1024, 256, 512 + 4 * 4),
        ("int8", 10, 4, 32),  # 10 codes, 3 scales: 22
        ("int4", 10, 4, 32),  # 5 and 3: 17
        ("int4", 8, 4, 16),  # 4 and 2: 12
        ("int8", 12, 12, 16),  # nothing to pad
    ],
)
def test_a_message(wire: Wire, numel: int, block_size: int, expected: int) -> None:
    assert message_bytes(numel, wire, "bf16", block_size) == expected


def test_codes_are_symmetric_around_zero() -> None:
    assert QMAX == {8: 127, 4: 7}


def test_a_cast_to_the_native_dtype_is_none() -> None:
    assert is_plain("native", "bf16")
    assert is_plain("bf16", "bf16")
    assert not is_plain("fp32", "bf16")
    assert not is_plain("int8", "bf16")
