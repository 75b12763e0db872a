"""Block quantization: error bounds per block as properties, and every odd value's defined outcome."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lowband.kernels.block_quant import dequantize, quantize
from lowband.spec.wire import QMAX

INF, NAN = float("inf"), float("nan")


def there_and_back(values: torch.Tensor, bits: int, block: int) -> torch.Tensor:
    codes, scales = quantize(values, bits, block)
    assert codes.shape == (values.shape[0], values.shape[1] * bits // 8)
    assert scales.shape == (values.shape[0], -(-values.shape[1] // block))
    return dequantize(codes, scales, bits, block)


@settings(deadline=None)
@given(
    bits=st.sampled_from([4, 8]),
    block=st.integers(1, 40),
    rows=st.integers(1, 4),
    half=st.integers(1, 60),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    exponent=st.integers(-12, 4),
    seed=st.integers(0, 10_000),
)
def test_error_is_within_half_a_step(bits, block, rows, half, dtype, exponent, seed) -> None:
    generator = torch.Generator().manual_seed(seed)
    values = (torch.randn(rows, 2 * half, generator=generator) * 10.0**exponent).to(dtype)
    back = there_and_back(values, bits, block)
    assert back.dtype == torch.float32
    for start in range(0, 2 * half, block):
        part = values[:, start : start + block].double()
        scale = part.abs().amax(dim=1, keepdim=True) / QMAX[bits]
        error = (back[:, start : start + block].double() - part).abs()
        # half a step, and fp32 roundings of the quotient and of the product
        assert (error <= scale * (0.5 + QMAX[bits] * 3e-7) + QMAX[bits] * 1.2e-38).all()


@pytest.mark.parametrize("bits", [4, 8])
def test_the_largest_value_of_a_block_is_exact(bits: int) -> None:
    values = torch.tensor([[-7.0 * 127, 1.0, 0.0, 7.0 * 127]])
    assert there_and_back(values, bits, 4)[0, [0, 2, 3]].tolist() == [-889.0, 0.0, 889.0]


@pytest.mark.parametrize("bits", [4, 8])
def test_every_code_comes_back(bits: int) -> None:
    top = QMAX[bits]
    values = torch.arange(-top, top + 1, dtype=torch.float32)
    values = torch.cat((values, values[:1]))[None]  # an even number
    assert torch.equal(there_and_back(values, bits, 1000), values)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("odd", [INF, -INF, NAN])
def test_what_is_not_finite_spoils_its_block_only(bits: int, odd: float) -> None:
    values = torch.ones(1, 8)
    values[0, 5] = odd
    back = there_and_back(values, bits, 4)
    assert torch.equal(back[0, :4], torch.ones(4))
    assert back[0, 4:].isnan().all()


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("small", [0.0, 1e-45, -1e-39, 1.1e-38])
def test_zeros_and_denormals_are_zeros(bits: int, small: float) -> None:
    assert torch.equal(there_and_back(torch.full((2, 6), small), bits, 4), torch.zeros(2, 6))


@pytest.mark.parametrize("bits", [4, 8])
def test_large_values_do_not_overflow(bits: int) -> None:
    values = torch.tensor([[3.4e38, -3.4e38, 1e38, 0.0]])
    back = there_and_back(values, bits, 4)
    assert back.isfinite().all()
    assert torch.allclose(back, values, rtol=0, atol=3.4e38 / QMAX[bits] / 2 * 1.001)
