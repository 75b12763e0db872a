"""One pass of AdamW against its definition in torch, bit by bit, and that against torch's own in fp64."""

import pytest
import torch
from common import BF16, ON_GPU

from lowband.kernels.adamw import adamw, reference
from lowband.kernels.adamw_scalars import Scalars
from lowband.kernels.adamw_triton import TILE

# Of gradients and copies: the interpreter's 16 bits are fp16's.
SIXTEEN = torch.bfloat16 if ON_GPU else torch.float16
SCALARS = Scalars.of(3e-4, (0.9, 0.95), 1e-8, 0.1, 3)


def drawn(n: int, grad_dtype: torch.dtype, device: torch.device) -> list[torch.Tensor]:
    """master, grad, first, second: magnitudes of training, with zeros, large ones and denormals."""
    generator = torch.Generator().manual_seed(n)
    master, grad, first = (torch.randn(n, generator=generator) for _ in range(3))
    second = torch.rand(n, generator=generator) * 1e-6
    for tensor in (grad, first, second):
        tensor *= 10.0 ** torch.randint(-8, 1, (n,), generator=generator)
        tensor[::7] = 0
    second[::11] = 1e-41
    return [each.to(device) for each in (master, grad.to(grad_dtype), first, second)]


@pytest.mark.parametrize("has_factor", [True, False])
@pytest.mark.parametrize("has_copy", [True, False])
@pytest.mark.parametrize("grad_dtype", [torch.float32, torch.float16, BF16], ids=str)
@pytest.mark.parametrize("n", [1, 256, TILE, 5 * TILE + 256 + 1])
def test_the_bits_are_the_definitions(device, n, grad_dtype, has_copy: bool, has_factor: bool) -> None:
    tensors = drawn(n, grad_dtype, device)
    factor = torch.tensor(0.37, device=device) if has_factor else None
    wide = torch.full((n + 1,), 7.0, dtype=SIXTEEN, device=device)
    copy = wide[:n] if has_copy else None
    behind = [torch.cat((each, torch.full_like(each[:1], 5.0))) for each in tensors]
    adamw(*(each[:n] for each in behind), SCALARS, factor, copy)
    expected = [each.cpu() for each in tensors]
    copied = torch.empty(n, dtype=SIXTEEN)
    reference(*expected, SCALARS, None if factor is None else factor.cpu(), copied)
    for found, right in zip(behind, expected, strict=True):
        assert torch.equal(found[:n].cpu(), right)
        assert found[n] == 5.0
    assert torch.equal(wide[:n].cpu(), copied) == has_copy
    assert wide[n] == 7.0


def test_infinities_and_nans_stay(device) -> None:
    master, grad, first, second = drawn(64, torch.float32, device)
    grad[0], grad[1] = float("inf"), float("nan")
    adamw(master, grad, first, second, SCALARS)
    assert master[:2].isnan().all()
    assert master[2:].isfinite().all()


def test_the_definition_is_adamw() -> None:
    """Steps of torch's optimizer in fp64, from fp32 values: the error of fp32 in a few roundings a step."""
    lr, betas, eps, decay = 1e-3, (0.9, 0.95), 1e-8, 0.1
    torch.manual_seed(0)
    start = torch.randn(4096)
    exact = start.double().requires_grad_()
    optimizer = torch.optim.AdamW([exact], lr, betas, eps, decay)
    master, first, second = start.clone(), torch.zeros(4096), torch.zeros(4096)
    for step in range(1, 6):
        grad = torch.randn(4096)
        exact.grad = 0.5 * grad.double()
        optimizer.step()
        reference(master, grad, first, second, Scalars.of(lr, betas, eps, decay, step), torch.tensor(0.5))
    torch.testing.assert_close(master.double(), exact.detach(), rtol=0, atol=2e-6)
