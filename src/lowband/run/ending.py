"""Recording of a run that ended early: its cause is printed first; the first recorded outcome stays."""

import signal
import sys

from lowband.spec.records import Outcome, Status
from lowband.spec.run import RunSpec
from lowband.spec.run_folder import RunFolder

# Statuses that one rank can record without the others.
FAILED: tuple[Status, ...] = ("error", "oom", "timeout")

_ORDERED = {
    signal.SIGTERM: "ended by SIGTERM: cancelled, out of its job's time, or another rank's death",
    signal.SIGINT: "interrupted",
}
# Error texts in lower case, from torch, CUDA and NCCL; Python; torch on a CPU; cuBLAS.
_OUT_OF_MEMORY = ("out of memory", "memoryerror", "not enough memory", "cublas_status_alloc_failed")


def exit_code(outcome: Outcome, folder: RunFolder) -> int:
    """0 for a run whose outcome becomes a row of the tables, 1 for a failed job.

    Out of memory, out of time and NaN are results. A run that is out of time but has a checkpoint resumes
    from it when started again, so it is not finished.
    """
    is_unfinished = outcome.status == "timeout" and folder.has_checkpoint
    return int(outcome.status == "error" or is_unfinished)


def failure(error: str, folder: RunFolder) -> Outcome:
    """The outcome for an error of one or more lines, of which the first is the cause."""
    is_oom = any(sign in error.lower() for sign in _OUT_OF_MEMORY)
    cause = error.partition("\n")[0]
    return Outcome(status="oom" if is_oom else "error", cause=cause, steps=folder.count_steps())


def ordered(order: signal.Signals, folder: RunFolder) -> Outcome:
    return Outcome(status="error", cause=_ORDERED[order], steps=folder.count_steps())


def out_of_time(spec: RunSpec, folder: RunFolder) -> Outcome:
    cause = f"the run took longer than its time_limit_s of {spec.time_limit_s}"
    return Outcome(status="timeout", cause=cause, steps=folder.count_steps())


def record(outcome: Outcome, folder: RunFolder) -> Outcome:
    """Print the cause, then write the outcome unless there is one already. Returns the recorded one.

    If it cannot be written, e.g. on a full disk, prints that too and returns the given outcome.
    """
    report(outcome.cause)
    try:
        return folder.write_outcome(outcome)
    except OSError as error:
        report(f"{error.filename}: {error.strerror}")
        return outcome


def report(line: str) -> None:
    sys.stderr.write(f"lowband: {line}\n")
    sys.stderr.flush()
