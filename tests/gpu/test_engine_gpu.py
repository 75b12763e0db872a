"""The engine on CUDA or ROCm devices: one rank over NCCL or RCCL, several on one device over gloo.

Where there are several devices, also one rank on each over NCCL or RCCL.
"""

from datetime import timedelta
from functools import cache
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

pytest.importorskip("pydantic", reason="specs are read with pydantic; the kernels' tests do without")
from test_parity import CLIP, CONFIG, EXACT, INNER, QUANTIZED, SPEC, STEPS, optimizer_of, part_of_batch

import lowband
from lowband.cost.memory import start_bytes
from lowband.engine.passes.engine import engine_of
from lowband.engine.passes.grad_norm import factor_of
from lowband.engine.passes.whole import state_digests
from lowband.engine.units.shard_sums import part_of
from lowband.kernels.adamw import reference
from lowband.kernels.adamw_scalars import Scalars
from lowband.model.gpt import GPT, Block
from lowband.run.on_ranks import on_ranks
from lowband.spec.mesh import Levels
from lowband.trainers.trainer import fingerprint_of

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA or ROCm device"),
]
SEVERAL = {"gloo": 4}  # ranks
if torch.cuda.device_count() > 1:
    SEVERAL["nccl"] = min(8, 2 ** (torch.cuda.device_count().bit_length() - 1))


def train(scheme: str | None, backend: str, ranks: int, dtype: torch.dtype, folder: Path):
    """Losses of a few steps on the device; without a scheme the bare module.

    folder: where ranks over NCCL find each other; each has a device of its own
    """
    device = torch.device("cuda", 0)
    if backend == "nccl":
        rank, world = dist.get_rank(), dist.get_world_size()
        device = torch.device("cuda", rank)
        dist.destroy_process_group()  # the helper's gloo group
        dist.init_process_group(
            "nccl",
            init_method=f"file://{folder}/group",
            rank=rank,
            world_size=world,
            timeout=timedelta(seconds=60),
        )
    torch.cuda.set_device(device)
    with device:
        model = GPT(SPEC, seed=7)
    if scheme is None:
        model = model.to(dtype)
    else:
        model = lowband.shard(model, CONFIG.scheme(scheme), lowband.Topology(INNER), Block, dtype)
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
    times = engine_of(model).lanes.take_times() if scheme is not None else (0.0, 0.0, 0.0)
    return losses, times


@cache
def bare(ranks: int) -> list[float]:
    """Losses of the bare module in fp32, as so many ranks would train it."""
    [(losses, _)] = on_ranks(1, train, None, "gloo", ranks, torch.float32, Path())
    return losses


@pytest.mark.parametrize("scheme", EXACT + QUANTIZED)
def test_one_rank_over_nccl(scheme: str, tmp_path: Path) -> None:
    [(losses, times)] = on_ranks(1, train, scheme, "nccl", 1, torch.float32, tmp_path)
    assert losses == pytest.approx(bare(1), rel=1e-5)
    assert all(seconds >= 0 for seconds in times)


@pytest.mark.parametrize("backend", SEVERAL)
@pytest.mark.parametrize("scheme", EXACT + QUANTIZED)
def test_several_ranks(scheme: str, backend: str, tmp_path: Path) -> None:
    """On one device over gloo, which waits for the lane in every collective; on their own over NCCL."""
    ranks = SEVERAL[backend]
    expected = bare(ranks)
    by_rank = on_ranks(ranks, train, scheme, backend, ranks, torch.float32, tmp_path)
    means = [sum(losses) / ranks for losses in zip(*(losses for losses, _ in by_rank), strict=True)]
    assert means == pytest.approx(expected, rel=1e-4 if scheme in EXACT else 2e-3)
    assert scheme in EXACT or means != pytest.approx(expected, rel=1e-7)  # the wires are in use
    assert all(times[1] > 0 for _, times in by_rank)


@pytest.mark.parametrize("scheme", ["zero3", "hier3-exact"])
def test_bf16_stays_near_fp32(scheme: str, tmp_path: Path) -> None:
    [(losses, _)] = on_ranks(1, train, scheme, "nccl", 1, torch.bfloat16, tmp_path)
    assert losses == pytest.approx(bare(1), rel=2e-2)


def state_of(is_deferred: bool, folder: Path) -> tuple[str, int]:
    """The fingerprint of initial weights that the GPU draws, and the peak bytes of making them."""
    dist.destroy_process_group()  # the helper's gloo group
    dist.init_process_group("nccl", init_method=f"file://{folder}/{is_deferred}", rank=0, world_size=1)
    torch.cuda.set_device(0)
    topology = lowband.Topology({})
    with torch.device("meta" if is_deferred else "cuda"):
        model = GPT(SPEC, seed=7)
    lowband.shard(model, CONFIG.scheme("zero3"), topology, Block, init=model.init, seed=7)
    assert {p.device.type for p in model.parameters()} == {"cuda"}
    return fingerprint_of(state_digests(model, engine_of(model))), engine_of(model).meter.peak["start"]


def test_deferred_values_are_those_of_a_module_built_on_the_gpu(tmp_path: Path) -> None:
    [(expected, _)] = on_ranks(1, state_of, False, tmp_path)
    [(found, peak)] = on_ranks(1, state_of, True, tmp_path)
    assert found == expected
    assert peak == start_bytes(SPEC.unit_shapes(), CONFIG.scheme("zero3"), Levels.fit({}, 1), "bf16")


def steps_in_one_pass(kind: str) -> list[bool]:
    """Of each step of lowband.AdamW in bf16, whether masters have the bits of its definition on the CPU, from
    the same gradients, and the 16-bit weights theirs."""
    device, lr = torch.device(kind, 0) if kind == "cuda" else torch.device(kind), 1e-2
    with device:
        model = GPT(SPEC, seed=7)
    scheme, topology = CONFIG.scheme("zero3"), lowband.Topology(INNER)
    lowband.shard(model, scheme, topology, Block, torch.bfloat16, torch.bfloat16, device=device)
    optimizer, found = lowband.AdamW(model, lr), []
    masters = {p: [part_of(p).cpu().clone(), *torch.zeros(2, p.numel())] for p in model.parameters()}
    for step in range(STEPS):
        model(*(part.to(device) for part in part_of_batch(step, 0, 0, 1, 1))).backward()
        factor = factor_of(optimizer.clip_grad_norm_(CLIP), CLIP).cpu()
        grads = {p: p.grad.as_subclass(torch.Tensor).cpu() for p in masters}
        assert {grad.dtype for grad in grads.values()} == {torch.bfloat16}
        optimizer.step()
        optimizer.zero_grad()
        scalars = Scalars.of(lr, (0.9, 0.999), 1e-8, 1e-2, step + 1)
        for p, (master, *moments) in masters.items():
            reference(master, grads[p], *moments, scalars, factor)
        are_right = all(torch.equal(part_of(p).cpu(), master) for p, (master, *_) in masters.items())
        units = engine_of(model).units
        found.append(are_right and all(torch.equal(u.weights, u.master.bfloat16()) for u in units))
    return found


def test_one_pass_of_adamw_has_the_bits_of_its_definition() -> None:
    [found] = on_ranks(1, steps_in_one_pass, "cuda")
    assert found == [True] * STEPS
