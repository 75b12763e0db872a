"""A training run: spec.json in, env.json, steps.jsonl and outcome.json out, all in the spec's folder."""

import hashlib
import signal
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from threading import Event
from typing import Any

import torch
import torch._dynamo  # every optimizer's first step imports it; so import it once, before forking the ranks
import torch.distributed as dist

from lowband.box.network import OWN, PLAIN, SHAPED, kind_of
from lowband.engine.transport.consistency import check_same
from lowband.errors import UserError
from lowband.kernels import flash_attention
from lowband.model.data import Corpus, batch, read_corpus
from lowband.run.count_fake import count
from lowband.run.ending import FAILED, exit_code, failure, ordered, out_of_time, record, report
from lowband.run.environment import describe, host, source_sha256
from lowband.run.exit_cause import exit_on_order
from lowband.run.joining import BACKENDS, device_type, join_job
from lowband.run.launch import RankFailure, TimeLimit, run_local, run_ranks
from lowband.run.pacing import Overloaded
from lowband.run.ranks import Rank, from_environment, is_first_process, job_id, ranks_here, step_name
from lowband.run.room import check_room
from lowband.run.training_loop import Diverged, train_rank
from lowband.spec.lock import hold, job_of
from lowband.spec.records import Environment, Outcome
from lowband.spec.run import RunSpec
from lowband.spec.run_folder import RunFolder
from lowband.trainers import deepspeed

SEEN_S = 5.0  # longest time until a file is visible on another host


@dataclass(frozen=True)
class RunContext:
    """The inputs of a run that all ranks share."""

    spec: RunSpec
    corpus: Corpus
    folder: RunFolder
    links: str
    device_type: str  # cpu | cuda


def train(spec_path: Path, links: str = OWN, again: bool = False) -> Outcome:
    """Run the spec: as one rank or a node's ranks under torchrun or srun, otherwise all ranks here.

    links: how the ranks are connected, for the record; `network.SHAPED`: by a box's links
    again: also if it has ended well, whose rows are then lost
    Returns the outcome, also of a failed run; it is in the folder too, if it could be written. One that has
    ended well before is left as it is.
    Raises UserError, with nothing written, if the spec or its text cannot be used or another process runs
    the folder; SystemExit and KeyboardInterrupt after SIGTERM and Ctrl-C.
    """
    spec = RunSpec.read_json(spec_path)
    folder = RunFolder(spec_path.parent, spec.training_sum)
    mine = None if spec.device == "fake" else from_environment(spec.ranks)
    on = "fake" if spec.device == "fake" else device_type(spec, is_launched=mine is not None)
    if not again and (before := _ended_before(spec, folder, links, on)) is not None:
        if is_first_process():
            report(f"{folder.path.name}: has ended already; `lowband train --again` trains it anew")
        return before
    if on == "fake":
        return _count(spec, folder)
    has_devices = spec.machine.device.memory_gib is not None and spec.machine.box is None
    if on == "cpu" and has_devices and is_first_process():
        report(f"{spec.run_id}: trains on the CPU: fewer devices here than its {spec.ranks} ranks")
    if spec.engine == "deepspeed" and mine is not None:  # a job's ranks, which would wait for each other
        deepspeed.load(on)
    try:
        spec.check_engine()
        if spec.engine == "deepspeed":
            deepspeed.load(on)
    except UserError as error:
        outcome = Outcome(status="not run", cause=str(error), steps=0)
        if not is_first_process():
            return outcome
        with _started(folder):
            return folder.write_outcome(outcome)
    check_room(spec, folder, BACKENDS[on], ranks_here(mine, spec.ranks))
    if spec.attention == "flash2":
        flash_attention.require(torch.device(on))
        flash_attention.check_heads(spec.model.heads, spec.model.heads, spec.model.hidden // spec.model.heads)
    corpus = read_corpus(spec.text)
    if corpus.vocab > spec.model.vocab:
        raise UserError(
            f"the text has tokens up to {corpus.vocab - 1}",
            where=spec.text,
            allowed=f"tokens below {spec.model.vocab}, the vocabulary of {spec.model.name}",
        )
    batch(corpus.train, spec.seed, 0, 0, 1, 1, spec.seq_len)  # raises if the text is too short
    job = RunContext(spec, corpus, folder, links, on)
    with _started(folder) if is_first_process() else nullcontext():
        return _run_launched_rank(mine, job) if isinstance(mine, Rank) else _run_ranks(mine, job)


def _ended_before(spec: RunSpec, folder: RunFolder, links: str, on: str) -> Outcome | None:
    """The outcome of the same run, on such devices and links, if it has ended well.

    It is the same on all ranks: none of them changes it.
    Raises UserError for one that devices or a box's links have made which are missing here.
    """
    outcome = folder.read_outcome()
    if outcome is None or (outcome.status, outcome.of) != ("ok", spec.training_sum):
        return None
    try:
        then = Environment.read_json(folder.env)
    except UserError:
        return None
    if on == "fake":
        return outcome if then.backend == on else None
    made, here = (then.backend, kind_of(then.links)), (BACKENDS[on], kind_of(links))
    for before, now in zip(made, here, strict=True):
        if (before, now) in ((BACKENDS["cuda"], BACKENDS["cpu"]), (SHAPED, PLAIN)):
            what = f"has ended on {before}, and here is {now}"
            raise UserError(what, where=folder.path, allowed="lowband train --again, which erases it")
    is_same = made == here and then.data.get("sha256") == read_corpus(spec.text).facts["sha256"]
    return outcome if is_same else None


@contextmanager
def _started(folder: RunFolder) -> Iterator[None]:
    """Hold the folder's lock, and clear the leftovers of an earlier attempt, and this one's at its end."""
    with hold(folder.lock, job_id()):
        if line := folder.start():
            report(line)
        try:
            yield
        finally:
            folder.remove_states()


def _count(spec: RunSpec, folder: RunFolder) -> Outcome:
    with _started(folder):
        folder.write_environment(
            describe((host(),), torch.device("cpu"), "fake", {"source": "none: nothing is computed"}, "none")
        )
        return folder.write_outcome(count(spec))


def _run_ranks(mine: list[Rank] | None, job: RunContext) -> Outcome:
    """Fork this node's ranks, or all ranks without a launcher, and record the cause if they fail."""
    spec, folder = job.spec, job.folder
    source_sha256()  # read once, before the ranks are forked
    try:
        if mine is None:
            run_local(spec.ranks, lambda rank: _run_rank(rank, job), spec.time_limit_s)
        else:
            with folder.causes(step_name()) as causes:
                run_ranks(mine, lambda rank: _run_rank(rank, job), spec.time_limit_s, causes)
    except RankFailure as error:
        outcome = _recorded_by_first_process(error.cause, folder)
        return outcome or _record(failure(str(error), folder), folder)
    except (SystemExit, KeyboardInterrupt) as order:
        is_term = isinstance(order, SystemExit)
        _record(ordered(signal.SIGTERM if is_term else signal.SIGINT, folder), folder)
        raise
    except TimeLimit:
        return _record(out_of_time(spec, folder), folder)
    return folder.await_outcome(SEEN_S)


def _run_launched_rank(rank: Rank, job: RunContext) -> Outcome:
    """Run a rank under an outer launcher: no parent watches all ranks, so the first to fail records why."""
    spec, folder = job.spec, job.folder
    has_joined = Event()

    def end(order: signal.Signals | None) -> int:
        outcome = out_of_time(spec, folder) if order is None else ordered(order, folder)
        code = exit_code(_record(outcome, folder), folder)
        return 128 + order if order == signal.SIGINT else code

    def look() -> int | None:
        # Before all ranks have joined, the outcome may be that of an earlier attempt.
        outcome = folder.read_outcome() if has_joined.is_set() else None
        if outcome is None or outcome.status not in FAILED:
            return None
        report(f"rank {rank.rank} ends because another rank failed: {outcome.cause}")
        return exit_code(outcome, folder)

    with exit_on_order(spec.time_limit_s, end, look):
        try:
            return _run_rank(rank, job, has_joined.set)
        except Exception as error:
            what = f"{type(error).__name__}: {error}"
            if not isinstance(error, UserError):
                traceback.print_exc()
            elif outcome := _recorded_by_first_process(what, folder):
                return outcome
            return _record(failure(f"rank {rank.rank}: {what}", folder), folder)


def _recorded_by_first_process(what: str, folder: RunFolder) -> Outcome | None:
    """In another process: the outcome of the same error, if the first process records and so prints it."""
    deadline = time.monotonic() + SEEN_S
    while not is_first_process() and time.monotonic() < deadline:
        outcome = folder.read_outcome()
        if outcome is not None and outcome.cause.endswith(what.partition("\n")[0]):
            return outcome
        time.sleep(0.1)
    return None


def _record(outcome: Outcome, folder: RunFolder) -> Outcome:
    """Record a failure. If this job's lock of the folder is not visible within SEEN_S, only print it."""
    deadline = time.monotonic() + SEEN_S
    while not is_first_process() and job_of(folder.lock) != job_id():
        if time.monotonic() > deadline:
            report(outcome.cause)
            return outcome
        time.sleep(0.1)
    return record(outcome, folder)


def _run_rank(rank: Rank, job: RunContext, joined: Callable[[], None] = lambda: None) -> Outcome:
    """Train as one rank. joined: called when this rank has met all others."""
    spec, corpus, folder = job.spec, job.corpus, job.folder
    device = join_job(rank, spec, job.links, job.device_type)
    hosts = _check_same_start(spec, corpus.facts)
    joined()
    if rank.rank == 0:
        folder.write_environment(describe(hosts, device, dist.get_backend(), corpus.facts, job.links))
    try:
        outcome = train_rank(rank.rank, spec, corpus, device, folder, is_shaped=job.links == SHAPED)
    except Diverged as error:
        outcome = Outcome(status="nan", cause=str(error), steps=folder.count_steps())
    except Overloaded as error:
        outcome = Outcome(status="overloaded", cause=str(error), steps=folder.count_steps())
    if rank.rank == 0:
        outcome = folder.write_outcome(outcome)
    dist.barrier()  # no rank leaves, which would break connections, before the outcome is written
    dist.destroy_process_group()
    return outcome


def _check_same_start(spec: RunSpec, data: Mapping[str, Any]) -> tuple[str, ...]:
    """Hosts of all ranks. Raises UserError if a rank has another spec, text or version of the code.

    The code is compared by its content, not by its commit: hundreds of ranks that run git on a shared file
    system would be slow, and ranks whose git is too slow would seem to have another commit.
    """
    spec_sha256 = hashlib.sha256(spec.to_json().encode()).hexdigest()
    mine = {
        "spec": spec_sha256,
        "text": data["sha256"],
        "source code": source_sha256(),
        "torch": torch.__version__,
    }
    return check_same(mine)
