"""Each algorithm, forward and backward, against float64: short and long rows, odd values, large numbers."""

import pytest
import torch
from common import BF16, ON_GPU

from lowband.cost.softmax import GPU_ALGORITHMS
from lowband.errors import UserError
from lowband.kernels import softmax_triton as fast
from lowband.kernels.softmax import inputs, reference, softmax

INF, NAN = float("inf"), float("nan")
DTYPES = [torch.float32, torch.float16, BF16]
# Largest error over the row's largest value.
TOLERANCE = {torch.float32: 3e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
SHAPES = [(1, 1), (5, 3), (37, 128), (3, 1000), (2, 8192), (3, 20001)]


def close(found: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> None:
    assert found.isfinite().all()
    scale = expected.abs().amax(-1, keepdim=True).clamp_min(1e-6)
    error = ((found.cpu().double() - expected).abs() / scale).max()
    assert error <= TOLERANCE[dtype], f"{error:.2e}"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("rows", "columns"), SHAPES)
@pytest.mark.parametrize("algorithm", GPU_ALGORITHMS)
def test_forward(device, algorithm, rows: int, columns: int, dtype: torch.dtype) -> None:
    x, _ = inputs(rows, columns, dtype, device)
    wide = torch.full((rows + 1, columns), NAN, dtype=dtype, device=device)
    fast.launch_forward(x, wide[:rows], algorithm)
    close(wide[:rows], reference(x.cpu().double()), dtype)
    assert wide[rows:].isnan().all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("rows", "columns"), SHAPES)
def test_backward(device, rows: int, columns: int, dtype: torch.dtype) -> None:
    """From the same y, against y (dy - sum y dy) in float64: errors of y are the forward's."""
    x, dy = inputs(rows, columns, dtype, device)
    y = reference(x.float()).to(dtype)
    wide = torch.full((rows + 1, columns), NAN, dtype=dtype, device=device)
    fast.launch_backward(y, dy, wide[:rows])
    y, dy = y.cpu().double(), dy.cpu().double()
    expected = y * (dy - (y * dy).sum(-1, keepdim=True))
    error = (wide[:rows].cpu().double() - expected).abs().max() / max(1e-2, float((y * dy).abs().max()))
    assert error <= TOLERANCE[dtype], f"{error:.2e}"
    assert wide[rows:].isnan().all()


@pytest.mark.parametrize("algorithm", GPU_ALGORITHMS)
def test_gradient_of_the_whole(device, algorithm) -> None:
    x, dy = inputs(2 * 3, 700, torch.float32, device)
    x, dy = x.view(2, 3, 700).transpose(0, 1).requires_grad_(), dy.view(3, 2, 700)
    leaf = x.detach().cpu().double().requires_grad_()
    (expected,) = torch.autograd.grad(reference(leaf), leaf, dy.cpu().double())
    (found,) = torch.autograd.grad(softmax(x, algorithm), x, dy)
    torch.testing.assert_close(found.cpu().double(), expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("algorithm", GPU_ALGORITHMS if ON_GPU else ["two_pass"])  # seconds each
def test_a_million_columns(device, algorithm) -> None:
    x, _ = inputs(1, 2**20 + 1, torch.float32, device)
    y = softmax(x, algorithm)
    close(y, reference(x.cpu().double()), torch.float32)
    assert y.cpu().double().sum() == pytest.approx(1, abs=1e-4)


@pytest.mark.parametrize("shift", [-3e38, -1e30, -5000.0, -200.0, 200.0, 5000.0, 1e30, 3e38])
@pytest.mark.parametrize("algorithm", GPU_ALGORITHMS)
def test_numbers_whose_exponential_overflows(device, algorithm, shift: float) -> None:
    x = torch.tensor([[shift, shift, shift - 2.0, shift - 1e4, shift / 2]])
    found = softmax(x.to(device), algorithm).cpu().double()
    # x's own rounding at this size aside, the result is exact to a few roundings.
    torch.testing.assert_close(found, reference(x.double()), rtol=1e-4, atol=1e-30)


@pytest.mark.parametrize("algorithm", GPU_ALGORITHMS)
def test_huge_numbers_that_differ(device, algorithm) -> None:
    least = torch.finfo(torch.float32).min  # the usual mask
    x = torch.tensor(
        [[least, least, least], [-2.2e38, least, -2.3e38], [3e38, 2.5e38, 1.0], [least, 0.0, 1.0]]
    )
    found = softmax(x.to(device), algorithm).cpu().double()
    torch.testing.assert_close(found, reference(x.double()), rtol=1e-5, atol=1e-30)


@pytest.mark.parametrize("place", [0, 9000])
@pytest.mark.parametrize(
    "odd", [[INF], [-INF], [NAN], [INF, -INF], [-INF, NAN]], ids=["inf", "-inf", "nan", "infs", "-inf nan"]
)
@pytest.mark.parametrize("algorithm", GPU_ALGORITHMS)
def test_odd_values_come_out_as_torchs(device, algorithm, odd: list[float], place: int) -> None:
    x = torch.linspace(-3, 3, 9002).repeat(2, 1)
    x[0, place : place + len(odd)] = torch.tensor(odd)
    found = softmax(x.to(device), algorithm).cpu()
    torch.testing.assert_close(found, torch.softmax(x, -1), rtol=1e-4, atol=1e-9, equal_nan=True)


@pytest.mark.parametrize("algorithm", GPU_ALGORITHMS)
def test_a_row_of_nothing_is_nan(device, algorithm) -> None:
    x = torch.full((2, 5), -INF)
    x[1] = 1.0
    y = softmax(x.to(device), algorithm).cpu()
    assert y[0].isnan().all()
    torch.testing.assert_close(y[1], torch.full((5,), 0.2))


def test_powers_of_two_are_exact(device) -> None:
    """Two-Pass's own claim: with x = k ln 2 as fp32 has it, mantissas agree and sums are those of powers."""
    k = torch.arange(-140.0, 1.0)
    x = (k.double() * 0.6931471805599453).float()[None]
    found = softmax(x.to(device), "two_pass").cpu().double()
    torch.testing.assert_close(found, reference(x.double()), rtol=3e-6, atol=1.2e-38)


def test_a_second_derivative_is_refused(device) -> None:
    x = torch.arange(4.0, device=device).view(2, 2).requires_grad_()
    (dx,) = torch.autograd.grad((softmax(x) * x).sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        dx.sum().backward()


def test_what_is_not_served_is_refused(device) -> None:
    with pytest.raises(UserError, match="unknown algorithm 'four_pass'"):
        softmax(torch.zeros(2, 2, device=device), "four_pass")
    with pytest.raises(UserError, match="float64"):
        softmax(torch.zeros(2, 2, dtype=torch.float64, device=device))
