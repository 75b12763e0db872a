"""The torch stand-in for DeepSpeed's quantizer, against its definition and against a sum in the open."""

import pytest
import torch

from lowband.trainers.deepspeed_quantizer import Quantizer

GROUPS, N = 6, 32


def values() -> torch.Tensor:
    return torch.randn(GROUPS, N, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("bits", [4, 8])
def test_error_is_half_a_step_but_for_the_clipped_largest(bits: int) -> None:
    x = values()
    codes, scales = Quantizer.quantize(x, GROUPS, bits, 0)
    assert codes.shape == (GROUPS, N * bits // 8)
    largest = x.abs().amax(1)
    assert torch.allclose(scales, 2 * largest / 2**bits)
    back = Quantizer.dequantize(codes, scales, GROUPS, bits, 0).float()
    top = (2 ** (bits - 1) - 1) * scales[:, None]  # the largest positive code
    expected = torch.minimum(x, top)
    assert ((back - expected).abs() <= scales[:, None] / 2 + 2e-3).all()  # fp16 rounds what comes back


def test_zeros_stay_zeros() -> None:
    codes, scales = Quantizer.quantize(torch.zeros(2, 8), 2, 4, 0)
    assert not Quantizer.dequantize(codes, scales, 2, 4, 0).any()


def test_two_hops_bring_each_rank_its_part_of_the_sum() -> None:
    """Two nodes of two ranks, played in one process, as coalesced_collectives.py of DeepSpeed calls it."""
    nodes, local = 2, 2
    world, groups = nodes * local, 8
    grads = [torch.randn(groups, 16, generator=torch.Generator().manual_seed(r)) for r in range(world)]
    sent = [Quantizer.swizzle_quant(g, groups, 4, 0, 1, nodes, local) for g in grads]

    def exchange(messages: list[torch.Tensor], partners: list[int]) -> list[torch.Tensor]:
        parts = [messages[p].view(len(partners), -1) for p in partners]
        return [torch.cat([part[i] for part in parts]) for i in range(len(partners))]

    reduced: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
    for node in range(nodes):
        partners = [node * local + i for i in range(local)]
        codes = exchange([message[0] for message in sent], partners)
        scales = exchange([message[1] for message in sent], partners)
        for rank, c, s in zip(partners, codes, scales, strict=True):
            reduced[rank] = Quantizer.quantized_reduction(c, s, groups, groups // local, 4, 0, local)
    true = sum(grads).view(world, -1)
    for place in range(local):
        partners = [place + node * local for node in range(nodes)]
        codes = exchange({r: m[0] for r, m in reduced.items()}, partners)
        scales = exchange({r: m[1] for r, m in reduced.items()}, partners)
        for rank, c, s in zip(partners, codes, scales, strict=True):
            final = Quantizer.dequantize(c, s, s.numel(), 4, 0).float().view(nodes, -1).sum(0)
            error = (final - true[rank]).norm() / true[rank].norm()
            assert error < 0.25, rank  # four bits twice; a wrong part would be off by more than 1
