"""The training loop of one rank."""

import hashlib
import json
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from lowband.box.links import sent_bytes
from lowband.engine.checkpoint.checkpointer import Checkpointer
from lowband.engine.replicas.replicas import Replicas
from lowband.engine.transport.everyone import everyones
from lowband.engine.transport.meeting import Meeting
from lowband.model.data import Corpus, batch
from lowband.run import slow
from lowband.run.clock import StepClock, StepTimes, peak_memory_bytes, peak_reserved_bytes, reset_peak_memory
from lowband.run.count_calls import Outside
from lowband.run.pacing import MOST_REAL_SHARE, Overloaded, PacedDevice
from lowband.spec.activations import CONTEXT, PIPELINE, TENSOR
from lowband.spec.records import Outcome, Sent, Slowest, StateBytes, StepRecord, mean
from lowband.spec.run import OPTIONS, RunSpec
from lowband.spec.run_folder import RunFolder
from lowband.spec.step import NORM_GATHER, STEP
from lowband.trainers.prepare import prepare
from lowband.trainers.trainer import Batch, Trainer

# Options that change neither results nor times; the text counts by its content, not by its path.
_NOT_OF_THE_TRAINING = {"time_limit_s", "peer_timeout_s", "checkpoint_every", "text", "fingerprint"}


class Diverged(Exception):
    """The loss or the gradient norm is not finite. The text contains the step."""


def train_rank(
    rank: int, spec: RunSpec, corpus: Corpus, device: torch.device, folder: RunFolder, is_shaped: bool
) -> Outcome:
    """Train according to the spec, from the last checkpoint if there is one; rank 0 records each step.

    rank:      this one's number in the job
    is_shaped: whether the rank has a box's network interface, whose byte counter is read
    Raises Diverged or Overloaded, on every rank at the same step.
    """
    is_first = rank == 0
    trainer = prepare(spec, device)
    model, optimizer = trainer.model, trainer.optimizer
    replicas = trainer.replicas
    outside = Outside(spec.job_levels, trainer.lanes)
    clock = StepClock(trainer.lanes, device)
    checkpointer = _checkpointer(spec, corpus, folder)
    resumed_from, outside_sent = _resume(rank, checkpointer, trainer)
    stall_s = 0.0
    if is_first:
        folder.go_back_to(resumed_from)
    paced = _paced_device(spec)
    sent_before = sent_bytes() if is_shaped else 0
    reset_peak_memory(device)
    for step in range(resumed_from + 1, spec.steps + 1):
        clock.start()
        # Count a steady, untimed step: the first gathers no updated weights, later warm-up steps do.
        with outside if step == spec.warmup_steps > 1 else nullcontext():
            with paced or nullcontext():
                loss = _backward(rank, spec, corpus, trainer, step, device)
            grad_norm = trainer.step(spec.grad_clip)
        outside_sent = outside.sent or outside_sent
        times = clock.stop()
        real_share = paced.take_real_share() if paced else math.nan
        counted = trainer.take_sent(), trainer.take_message_s()
        line = _gather_record(spec, step, loss, grad_norm, times, real_share, *counted)
        if not math.isfinite(line.loss) or not math.isfinite(line.grad_norm):
            raise Diverged(f"loss {line.loss}, gradient norm {line.grad_norm} at step {step}")
        if line.real_share is not None and line.real_share > MOST_REAL_SHARE and step > spec.warmup_steps:
            raise Overloaded(
                f"real computation took {line.real_share:.0%} of the paced time at step {step}; "
                f"at most {MOST_REAL_SHARE:.0%} keeps the speed constant"
            )
        if is_shaped:
            sent_so_far = sent_bytes()
            line = line.model_copy(update={"interface_bytes": sent_so_far - sent_before})
            sent_before = sent_so_far
        if is_first:
            folder.append_step(line)
        if checkpointer is not None and step % spec.checkpoint_every == 0:
            extra = {"step": step, "outside": [sent.model_dump() for sent in outside_sent]}
            if replicas is not None and replicas.sync.delay:
                extra["in_flight"] = _in_flight(replicas)
            checkpointer.save(step, model, optimizer, extra)
            stall_s = max(stall_s, checkpointer.stall_s)
    if checkpointer is not None:
        checkpointer.wait()
    distance = _distance(replicas)
    trainer.finish()
    # Read from the file, which also has the steps of earlier attempts: all steps, if one stopped at its end.
    steps = folder.whole_steps() if is_first else []
    outcome = _outcome(spec, trainer, device, has_stepped=resumed_from < spec.steps)
    return outcome.model_copy(
        update={
            "resumed_from": resumed_from,
            "notes": "; ".join(
                filter(None, (outcome.notes, *(checkpointer.skipped if checkpointer else ())))
            ),
            "checkpoint_stall_s": stall_s,
            "sent": _mean_sent(steps[-spec.scheme.period :]),
            "outside": outside_sent,
            "slow": slow.named(steps[max(resumed_from, spec.warmup_steps) :]),
            "interface_bytes": _total([step.interface_bytes for step in steps]),
            "consensus_distance": distance,
        }
    )


def _distance(replicas: Replicas | None) -> float | None:
    """How far replicas are apart, where they never agree."""
    return None if replicas is None or replicas.sync.has_anchor else replicas.distance()


def _paced_device(spec: RunSpec) -> PacedDevice | None:
    """In a box, a device with the machine's speed divided by the scale; otherwise None."""
    box = spec.machine.box
    return PacedDevice(box.tflops * 1e12 / box.scale) if box is not None else None


def _checkpointer(spec: RunSpec, corpus: Corpus, folder: RunFolder) -> Checkpointer | None:
    return Checkpointer(_checkpoints(spec, corpus, folder)) if spec.checkpoint_every else None


def _checkpoints(spec: RunSpec, corpus: Corpus, folder: RunFolder) -> Path:
    """Folder of a run's checkpoints, which depends on spec and text: a changed run never resumes from it."""
    options = spec.model_dump(mode="json", include=set(OPTIONS) - _NOT_OF_THE_TRAINING)
    content = json.dumps({**options, "text_sha256": corpus.facts["sha256"]}, sort_keys=True)
    return folder.checkpoints / hashlib.sha256(content.encode()).hexdigest()[:12]


def _resume(rank: int, checkpointer: Checkpointer | None, trainer: Trainer) -> tuple[int, tuple[Sent, ...]]:
    """Load the newest undamaged checkpoint; returns its step and outside counts, (0, ()) if there is none."""
    extra = None
    if checkpointer is not None:
        extra = checkpointer.load_newest(trainer.model, trainer.optimizer)
    if extra is None:
        return 0, ()
    if "in_flight" in extra and trainer.replicas is not None:
        mine = extra["in_flight"][rank]
        trainer.replicas.count_in_flight(
            {unit: [Sent.model_validate(one) for one in sent] for unit, sent in mine.items()}
        )
    return int(extra["step"]), tuple(Sent.model_validate(sent) for sent in extra["outside"])


def _in_flight(replicas: Replicas) -> list[dict[str, list[dict[str, Any]]]]:
    """By rank and unit: what exchanges have sent that no step has counted, because they have not arrived."""
    sent = {name: [one.model_dump() for one in counts] for name, counts in replicas.sent_in_flight().items()}
    return everyones(sent)


def _backward(
    rank: int, spec: RunSpec, corpus: Corpus, trainer: Trainer, step: int, device: torch.device
) -> torch.Tensor:
    """All forward and backward passes of a step; returns this rank's mean loss, fp32 scalar.

    It is 0 on a rank along pipeline without the last stage.
    """

    data = spec.mesh.group("data", rank)
    place = data.index(rank)

    def batch_of(micro: int) -> Batch:
        # A global batch is ordered by accumulation step first, then by the place along the data axis, whose
        # neighbours along context have the same sequences.
        first = (micro * len(data) + place) // spec.context * spec.micro_batch
        inputs, targets = batch(
            corpus.train, spec.seed, step, first, spec.micro_batch, spec.global_batch, spec.seq_len
        )
        return torch.from_numpy(inputs).to(device), torch.from_numpy(targets).to(device)

    return sum(trainer.accumulate(spec.accumulation, batch_of), torch.zeros((), device=device))


def _gather_record(
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
    keys, counted = _sent_keys(spec), {(one.level, one.collective, one.wire): one.bytes for one in sent}
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
        sent=tuple(_mean_of_ranks(spec, {key: [row[own + i] for row in rows] for i, key in enumerate(keys)})),
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
    """Level, collective and wire of all that a rank may count; ranks of one job may count different ones."""
    if spec.engine != "lowband":  # a peer's engine counts nothing
        return []
    names = (*(row.name for row in (*STEP, *TENSOR, *PIPELINE, *CONTEXT)), NORM_GATHER)
    wires = {name: sorted({"native", spec.scheme.wire(name)}) for name in names}
    levels = spec.job_levels.names
    return sorted((level, name, wire) for level in levels for name in names for wire in wires[name])


def _mean_of_ranks(spec: RunSpec, by_rank: Mapping[tuple[str, str, str], Sequence[float]]) -> Iterator[Sent]:
    """What was sent per rank, in the mean over ranks. by_rank: NaN of ranks that have not counted the key"""
    for (level, name, wire), counts in by_rank.items():
        known = [int(count) for count in counts if not math.isnan(count)]
        if known:
            yield Sent(level=level, collective=name, wire=wire, bytes=mean(sum(known), spec.ranks))


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


def _mean_sent(steps: Sequence[StepRecord]) -> tuple[Sent, ...]:
    """What was sent per step, in the mean over the steps."""
    totals: Counter[tuple[str, str, str]] = Counter()
    for one in (sent for step in steps for sent in step.sent):
        totals[one.level, one.collective, one.wire] += one.bytes  # type: ignore[assignment]
    return tuple(
        Sent(level=level, collective=collective, wire=wire, bytes=mean(total, len(steps)))
        for (level, collective, wire), total in totals.items()
    )


def _known(seconds: float) -> float | None:
    """None for NaN, by which ranks exchange values that are not measured, e.g. a peer's communication."""
    return None if math.isnan(seconds) else seconds


def _all_gather(values: list[float], spec: RunSpec, device: torch.device) -> list[list[float]]:
    """Every rank's values, by rank."""
    mine = torch.tensor(values, dtype=torch.float64, device=device)
    rows = [torch.empty_like(mine) for _ in range(spec.ranks)]
    dist.all_gather(rows, mine)
    return [row.tolist() for row in rows]


def _total(counts: list[int | None]) -> int | None:
    """The sum of the counts; None if one is unknown or there are none."""
    known = [count for count in counts if count is not None]
    return sum(known) if known and len(known) == len(counts) else None


def _outcome(spec: RunSpec, trainer: Trainer, device: torch.device, has_stepped: bool) -> Outcome:
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
