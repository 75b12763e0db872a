"""Records of a run's steps and of its end, over all ranks: each has measured its own part."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from lowband.engine.transport.everyone import everyones
from lowband.engine.transport.meeting import Meeting
from lowband.run import slow
from lowband.run.clock import StepTimes, peak_memory_bytes, peak_reserved_bytes
from lowband.spec.activations import CONTEXT, EXPERT, KEPT, PIPELINE, TENSOR
from lowband.spec.records import Outcome, Sent, Slowest, StateBytes, StepRecord, by_row, mean, of_rows
from lowband.spec.run import RunSpec
from lowband.spec.step import COPIES, NORM_GATHER, STEP, WEIGHTS_COPIES
from lowband.spec.tiers import TIERS
from lowband.trainers.trainer import Trainer


def gather_record(
    spec: RunSpec,
    step: int,
    loss: torch.Tensor,
    grad_norm: float,
    times: StepTimes,
    real_share: float,
    sent: list[Sent],
    message_s: dict[int, float],
) -> StepRecord:
    """This step's record from all ranks' losses, times and bytes.

    message_s: this rank's, by partner
    """
    exchange_s = times.exchange_s if spec.scheme.sync is not None else math.nan
    mine = [loss.item(), times.step_s, times.exposed_s, times.hidden_s, real_share, grad_norm, exchange_s]
    keys, counted = _sent_keys(spec), by_row(sent)
    assert counted.keys() <= set(keys), counted
    own, before = len(mine), len(mine) + len(keys)
    mine += [counted.get(key, math.nan) for key in keys]
    # Only gloo's messages are timed; where it runs, ranks are few enough for a number of each pair.
    ranks = range(spec.ranks if dist.get_backend() == "gloo" else 0)
    mine += [message_s.get(rank, math.nan) for rank in ranks]
    rows, data = _all_gather(mine, spec, loss.device), spec.mesh.group("data", _rank_of_loss(spec))
    slowest = max(rows, key=lambda row: row[1])
    return StepRecord(
        step=step,
        step_time_s=slowest[1],
        compute_time_s=_known(slowest[1] - slowest[2]),
        exposed_comm_time_s=_known(slowest[2]),
        hidden_comm_time_s=_known(slowest[3]),
        exposed_sync_time_s=_known(slowest[6]),
        tokens=spec.tokens_per_step,
        loss=sum(rows[rank][0] for rank in data) / len(data),
        grad_norm=float(np.max([row[5] for row in rows])),  # NaN if one is
        sent=_mean_of_ranks(spec, {key: [row[own + i] for row in rows] for i, key in enumerate(keys)}),
        slowest=_slowest(spec, rows, before),
        real_share=_known(max(row[4] for row in rows)),
    )


def _rank_of_loss(spec: RunSpec) -> int:
    """The first rank that has the last stage, if there are several."""
    if not spec.is_in_stages:
        return 0
    last = [any(action.stage == spec.stages - 1 for action in of_rank) for of_rank in spec.lists]
    return spec.mesh.group("pipeline", 0)[last.index(True)]


def _sent_keys(spec: RunSpec) -> list[tuple[str, str, str]]:
    """Level, collective and wire of all that a rank may count; ranks of one job may count different ones.

    No others: the record travels over the links that are measured.
    """
    if spec.engine != "lowband":  # a peer's engine counts nothing
        return []
    has_tiers = bool(spec.scheme.tiers) or spec.recompute == "host"
    rows = [*STEP, *((*COPIES, *WEIGHTS_COPIES, *KEPT) if has_tiers else ())]
    for of_axis, has_axis in (
        (TENSOR, spec.tensor > 1), (PIPELINE, spec.pipeline > 1), (CONTEXT, spec.context > 1),
        (EXPERT, spec.model.experts is not None),
    ):  # fmt: skip
        rows += of_axis if has_axis else ()
    names = (*(row.name for row in rows), NORM_GATHER)
    wires = {name: sorted({"native", spec.scheme.wire(name)}) for name in names}
    levels = (*spec.job_levels.names, *(TIERS if has_tiers else ()))
    return sorted((level, name, wire) for level in levels for name in names for wire in wires[name])


def _mean_of_ranks(
    spec: RunSpec, by_rank: Mapping[tuple[str, str, str], Sequence[float]]
) -> tuple[Sent, ...]:
    """What was sent per rank, in the mean over ranks. by_rank: NaN of ranks that have not counted the key"""
    counted = {key: [int(n) for n in counts if not math.isnan(n)] for key, counts in by_rank.items()}
    return of_rows({key: mean(sum(known), spec.ranks) for key, known in counted.items() if known})


def _slowest(spec: RunSpec, rows: list[list[float]], messages: int) -> tuple[Slowest, ...]:
    """messages: where a row's times of messages begin"""
    computing = [row[1] - row[2] for row in rows]
    if any(math.isnan(seconds) for seconds in computing):  # a peer's engine
        return ()
    by_partner = [
        {rank: seconds for rank, seconds in enumerate(row[messages:]) if not math.isnan(seconds)}
        for row in rows
    ]
    return slow.slowest(spec.job_levels, computing, by_partner)


def mean_sent(steps: Sequence[StepRecord]) -> tuple[Sent, ...]:
    """What was sent per step, in the mean over the steps."""
    totals = Counter[tuple[str, str, str]]()
    for step in steps:
        totals.update(by_row(step.sent))  # type: ignore[arg-type]
    return of_rows({row: mean(total, len(steps)) for row, total in totals.items()})


def _known(seconds: float) -> float | None:
    """None for NaN, by which ranks exchange values that are not measured, e.g. a peer's communication."""
    return None if math.isnan(seconds) else seconds


def _all_gather(values: list[float], spec: RunSpec, device: torch.device) -> list[list[float]]:
    """Every rank's values, by rank."""
    mine = torch.tensor(values, dtype=torch.float64, device=device)
    rows = [torch.empty_like(mine) for _ in range(spec.ranks)]
    dist.all_gather(rows, mine)
    return [row.tolist() for row in rows]


def total(counts: list[int | None]) -> int | None:
    """The sum of the counts; None if one is unknown or there are none."""
    known = [count for count in counts if count is not None]
    return sum(known) if known and len(known) == len(counts) else None


def outcome_of(spec: RunSpec, trainer: Trainer, device: torch.device, has_stepped: bool) -> Outcome:
    """has_stepped: whether this attempt took a step; without one, its memory use is not a measurement."""
    memory = _memory(trainer, spec, device) if has_stepped else {}
    fingerprint = trainer.fingerprint(Meeting(spec.peer_timeout_s)) if spec.fingerprint else ""
    return Outcome(status="ok", steps=spec.steps, notes=trainer.notes, weights_sha256=fingerprint, **memory)


def _memory(trainer: Trainer, spec: RunSpec, device: torch.device) -> dict[str, Any]:
    """The memory fields of an outcome, over all ranks."""
    peaks = [row[0] for row in _all_gather([float(peak_memory_bytes(device))], spec, device)]
    reserved = peak_reserved_bytes(device)
    if reserved is not None:
        reserved = int(max(row[0] for row in _all_gather([float(reserved)], spec, device)))
    held = everyones(trainer.state_peaks())  # stages may have different kinds
    kinds = sorted({kind for of_rank in held for kind in of_rank})
    return {
        "peak_memory_bytes_max": int(max(peaks)),
        "peak_memory_bytes_min": int(min(peaks)),
        "peak_reserved_bytes_max": reserved,
        "states": tuple(
            StateBytes(kind=kind, bytes=max(of_rank.get(kind, 0) for of_rank in held)) for kind in kinds
        ),
    }
