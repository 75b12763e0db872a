"""The training loop of one rank."""

import hashlib
import json
import math
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import nn

from lowband.box.links import sent_bytes
from lowband.engine.api import consensus_distance
from lowband.engine.checkpoint.checkpointer import Checkpointer
from lowband.engine.parallel.experts import recent_loads, resume_loads
from lowband.engine.replicas.replicas import Replicas
from lowband.engine.transport.everyone import everyones
from lowband.model.data import Corpus, batch
from lowband.run import slow
from lowband.run.clock import StepClock, reset_peak_memory
from lowband.run.count_calls import Outside
from lowband.run.over_ranks import gather_record, mean_sent, outcome_of, total
from lowband.run.pacing import MOST_REAL_SHARE, Overloaded, PacedDevice
from lowband.spec.records import Outcome, Sent, StepRecord
from lowband.spec.run import UNSEEN, RunSpec
from lowband.spec.run_folder import RunFolder
from lowband.trainers.prepare import prepare
from lowband.trainers.trainer import Batch, Trainer


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
    trainer = prepare(spec, device, folder.disk)
    model, optimizer = trainer.model, trainer.optimizer
    replicas = trainer.replicas
    outside = Outside(spec.job_levels, trainer.lanes)
    clock = StepClock(trainer.lanes, device)
    checkpointer = _checkpointer(spec, corpus, folder)
    begins, outside_sent = _resume(rank, checkpointer, trainer)
    resumed_from = begins[-1]
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
        line = gather_record(spec, step, loss, grad_norm, times, real_share, *counted)
        if (end := _end(line, resumed_from + spec.warmup_steps)) is not None:
            if checkpointer is not None:
                checkpointer.wait()  # the last one before; the process would end in the midst of it
            raise end
        if is_shaped:
            sent_so_far = sent_bytes()
            line = line.model_copy(update={"interface_bytes": sent_so_far - sent_before})
            sent_before = sent_so_far
        if is_first:
            folder.append_step(line)
        if checkpointer is not None and step % spec.checkpoint_every == 0:
            extra = {"step": step, "begins": begins, **_extra(spec, trainer, outside_sent)}
            checkpointer.save(step, model, optimizer, extra)
            stall_s = max(stall_s, checkpointer.stall_s)
    if checkpointer is not None:
        checkpointer.wait()
    distance = _distance(model, spec, replicas)
    trainer.finish()
    # Read from the file, which also has the steps of earlier attempts: all steps, if one stopped at its end.
    steps = folder.whole_steps() if is_first else []
    outcome = outcome_of(spec, trainer, device, has_stepped=resumed_from < spec.steps)
    return outcome.model_copy(
        update={
            "resumed_from": resumed_from,
            "begins": tuple(begins),
            "notes": "; ".join(
                filter(None, (outcome.notes, *(checkpointer.skipped if checkpointer else ())))
            ),
            "checkpoint_stall_s": stall_s,
            "sent": mean_sent(steps[-spec.scheme.period :]),
            "outside": outside_sent,
            "slow": slow.named(steps[resumed_from + spec.warmup_steps :]),
            "interface_bytes": total([step.interface_bytes for step in steps]),
            "consensus_distance": distance,
        }
    )


def _end(line: StepRecord, warm: int) -> Diverged | Overloaded | None:
    """What ends the run after a step; None if it goes on. warm: the last step of the attempt's warm-up"""
    if not math.isfinite(line.loss) or not math.isfinite(line.grad_norm):
        return Diverged(f"loss {line.loss}, gradient norm {line.grad_norm} at step {line.step}")
    if line.real_share is not None and line.real_share > MOST_REAL_SHARE and line.step > warm:
        return Overloaded(
            f"real computation took {line.real_share:.0%} of the paced time at step {line.step}; "
            f"at most {MOST_REAL_SHARE:.0%} keeps the speed constant"
        )
    return None


def _extra(spec: RunSpec, trainer: Trainer, outside_sent: tuple[Sent, ...]) -> dict[str, Any]:
    """What a checkpoint holds beside the model's and the optimizer's states."""
    extra: dict[str, Any] = {"outside": [sent.model_dump() for sent in outside_sent]}
    if trainer.replicas is not None and trainer.replicas.sync.delay:
        extra["in_flight"] = _in_flight(trainer.replicas)
    if spec.copies:
        extra["loads"] = everyones(recent_loads(trainer.model))
    return extra


def _distance(model: nn.Module, spec: RunSpec, replicas: Replicas | None) -> float | None:
    """How far replicas are apart, where they never agree and each has whole layers."""
    if replicas is None or replicas.sync.has_anchor or spec.tensor > 1:
        return None
    return consensus_distance(model)


def _paced_device(spec: RunSpec) -> PacedDevice | None:
    """In a box, a device with the machine's speed divided by the scale; otherwise None."""
    box = spec.machine.box
    return PacedDevice(box.tflops * 1e12 / box.scale) if box is not None else None


def _checkpointer(spec: RunSpec, corpus: Corpus, folder: RunFolder) -> Checkpointer | None:
    return Checkpointer(_checkpoints(spec, corpus, folder)) if spec.checkpoint_every else None


def _checkpoints(spec: RunSpec, corpus: Corpus, folder: RunFolder) -> Path:
    """Folder of a run's checkpoints, which depends on spec and text: a changed run never resumes from it."""
    options = {k: value for k, value in spec.point.items() if k not in UNSEEN | {"text", "fingerprint"}}
    text = corpus.facts["sha256"]  # by its content, not by its path
    content = json.dumps({**options, "seed": spec.seed, "text_sha256": text}, sort_keys=True)
    return folder.checkpoints / hashlib.sha256(content.encode()).hexdigest()[:12]


def _resume(
    rank: int, checkpointer: Checkpointer | None, trainer: Trainer
) -> tuple[list[int], tuple[Sent, ...]]:
    """Load the newest undamaged checkpoint; returns after which steps attempts began whose steps are
    kept, and outside counts: [0], () if there is none."""
    extra = None
    if checkpointer is not None:
        extra = checkpointer.load_newest(trainer.model, trainer.optimizer)
    if extra is None:
        return [0], ()
    if "in_flight" in extra and trainer.replicas is not None:
        mine = extra["in_flight"][rank]
        trainer.replicas.count_in_flight(
            {unit: [Sent.model_validate(one) for one in sent] for unit, sent in mine.items()}
        )
    if "loads" in extra:
        resume_loads(trainer.model, extra["loads"][rank])
    begins = [*extra.get("begins", [0]), int(extra["step"])]
    return begins, tuple(Sent.model_validate(sent) for sent in extra["outside"])


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
