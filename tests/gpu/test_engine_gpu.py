"""The engine on one CUDA or ROCm device: one rank over NCCL or RCCL, several ranks over gloo for numerics."""

from datetime import timedelta
from functools import cache

import pytest
import torch
import torch.distributed as dist

pytest.importorskip("pydantic", reason="specs are read with pydantic; the kernels' tests do without")
from test_parity import CLIP, EXACT, INNER, QUANTIZED, SCHEMES_FILE, SPEC, STEPS, optimizer_of, part_of_batch

import lowband
from lowband.engine.api import engine_of
from lowband.model.gpt import GPT, Block
from lowband.run.group import on_ranks
from lowband.spec.scheme import read_scheme

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA or ROCm device"),
]


def train(scheme: str | None, backend: str, ranks: int, dtype: torch.dtype):
    """Losses of a few steps on the device; without a scheme the bare module."""
    if backend == "nccl":
        dist.destroy_process_group()  # the helper's gloo group
        dist.init_process_group(
            "nccl", store=dist.HashStore(), rank=0, world_size=1, timeout=timedelta(seconds=60)
        )
    device = torch.device("cuda", 0)
    torch.cuda.set_device(device)
    with device:
        model = GPT(SPEC, seed=7)
    if scheme is None:
        model = model.to(dtype)
    else:
        model = lowband.shard(model, read_scheme(SCHEMES_FILE, scheme), lowband.Topology(INNER), Block, dtype)
        engine_of(model).lanes.take_times()  # from now on they are kept
    optimizer = optimizer_of(model.parameters())
    losses = []
    for step in range(STEPS):
        total = 0.0
        parts = [dist.get_rank()] if scheme is not None else range(ranks)
        for rank in parts:
            arguments = (part.to(device) for part in part_of_batch(step, 0, rank, ranks, 1))
            loss = model(*arguments) / len(parts)
            loss.backward()
            total += loss.item()
        if scheme is None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        else:
            lowband.clip_grad_norm_(model, CLIP)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    times = engine_of(model).lanes.take_times() if scheme is not None else (0.0, 0.0)
    return losses, times


@cache
def bare(backend: str, ranks: int) -> list[float]:
    """Losses of the bare module in fp32, as so many ranks would train it."""
    [(losses, _)] = on_ranks(1, train, None, backend, ranks, torch.float32)
    return losses


@pytest.mark.parametrize("scheme", EXACT + QUANTIZED)
def test_one_rank_over_nccl(scheme: str) -> None:
    expected = bare("nccl", 1)
    [(losses, times)] = on_ranks(1, train, scheme, "nccl", 1, torch.float32)
    assert losses == pytest.approx(expected, rel=1e-5)
    assert all(seconds >= 0 for seconds in times)


@pytest.mark.parametrize("scheme", EXACT + QUANTIZED)
def test_several_ranks_on_one_device_over_gloo(scheme: str) -> None:
    expected = bare("gloo", 4)
    by_rank = on_ranks(4, train, scheme, "gloo", 4, torch.float32)
    means = [sum(losses) / 4 for losses in zip(*(losses for losses, _ in by_rank), strict=True)]
    assert means == pytest.approx(expected, rel=1e-4 if scheme in EXACT else 2e-3)
    assert scheme in EXACT or means != pytest.approx(expected, rel=1e-7)  # the wires are in use
    assert all(busy > 0 for _, (_, busy) in by_rank)


@pytest.mark.parametrize("scheme", ["zero3", "hier3-exact"])
def test_bf16_stays_near_fp32(scheme: str) -> None:
    expected = bare("nccl", 1)
    [(losses, _)] = on_ranks(1, train, scheme, "nccl", 1, torch.bfloat16)
    assert losses == pytest.approx(expected, rel=2e-2)
