"""Rank 0 of eight ranks that all hold and send the same: one process, without the others.

What such ranks would send each other is copied here, late: the lane is then far behind the computation, and
values that no wait protects are wrong. A buffer is filled with NaN before it is freed.
"""

import time
from unittest.mock import patch

import torch
import torch.distributed as dist
from named import levels_of
from test_parity import SPEC, optimizer_of, part_of_batch
from torch.testing._internal.distributed.fake_pg import FakeStore

import lowband
from lowband.engine.collectives import hops
from lowband.engine.transport import lane
from lowband.engine.units.states import UnitState
from lowband.engine.units.unit import Unit
from lowband.model.gpt import GPT, Block
from tests.checkout import CONFIG

RANKS, STEPS, CLIP = 8, 3, 5.0
LATE_S, LATE_CYCLES = 1e-3, 4_000_000
NAN_BYTE = 0xFF  # all bits set are a NaN, in fp32, bf16 and fp16


def train(
    scheme: str,
    dtype: torch.dtype,
    device: torch.device,
    is_late: bool,
    waits: bool = True,
    is_checked: bool = False,
) -> list[float]:
    """Losses and gradient norms, in a process of `on_ranks`, which this changes for good.

    is_late:    the device's lane and late collectives; else each runs where it is submitted
    waits:      whether a stream waits for events; if not, what it computes is wrong
    is_checked: whether torch's sanitizer of streams watches; it raises
    """
    dist.destroy_process_group()  # the helper's gloo group
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=RANKS)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if is_checked:
        from torch.cuda._sanitizer import enable_cuda_sanitizer

        enable_cuda_sanitizer()
    if not waits:
        torch.cuda.Stream.wait_event = lambda self, event: None
    if is_late:
        lane.InlineLanes = lambda levels: (
            lane.StreamLanes(levels, device) if device.type == "cuda" else lane.Lanes(levels)
        )
    _answer_for_all(device, is_late)
    _poison_what_is_freed()
    model = _model().to(device)
    model = lowband.shard(model, CONFIG.scheme(scheme), lowband.Topology(levels_of(scheme)), Block, dtype)
    optimizer = optimizer_of(model.parameters())
    found = []
    for step in range(STEPS):
        arguments = [part.to(device) for part in part_of_batch(step, 0, 0, RANKS, 1)]
        with lowband.no_sync(model):
            model(*arguments).backward()
        loss = model(*arguments)
        loss.backward()
        found += [float(lowband.clip_grad_norm_(model, CLIP)), loss.item()]
        optimizer.step()
        optimizer.zero_grad()
    return found


def _model() -> GPT:
    """Every weight is drawn: whatever part of them rank 0 has, wrong values change the loss."""
    model, generator = GPT(SPEC), torch.Generator().manual_seed(7)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.5, generator=generator)
    return model


def _answer_for_all(device: torch.device, is_late: bool) -> None:
    """Collectives in which every rank has what this one has."""

    def be_late() -> None:
        if is_late and device.type == "cuda":
            torch.cuda._sleep(LATE_CYCLES)
        elif is_late:
            time.sleep(LATE_S)

    def all_gather(out: torch.Tensor, mine: torch.Tensor, group: object) -> None:
        be_late()
        out.view(-1, mine.numel()).copy_(mine.clone())

    def reduce_scatter(out: torch.Tensor, full: torch.Tensor, group: object) -> None:
        be_late()
        parts = full.view(-1, out.numel())
        torch.mul(parts[0], len(parts), out=out)  # coordinate 0

    def all_to_all_single(received: torch.Tensor, sent: torch.Tensor, group: object) -> None:
        be_late()
        received.copy_(sent[:1].expand_as(sent))

    # `patch` raises where the engine does not have such a name any more.
    patch.object(hops, "all_gather", all_gather).start()
    patch.object(hops, "reduce_scatter", reduce_scatter).start()
    patch.object(dist, "all_to_all_single", all_to_all_single).start()


def _poison_what_is_freed() -> None:
    free = Unit._free

    def poison_and_free(unit: Unit) -> None:
        if unit.state is UnitState.GATHERED and not unit.is_whole:
            unit.flat.untyped_storage().fill_(NAN_BYTE)
        free(unit)

    Unit._free = poison_and_free
