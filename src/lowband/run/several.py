"""Several runs in one job: `python -m lowband.run.several MINUTES LOGS LAUNCH... -- FOLDER...`

They follow each other. A run that has ended is not started again, so the same command continues where a job
was cut or some of its runs failed; a failed run keeps none of the others from running. Each that has ended
gets the marker `trained` in its folder, with the checksum of its outcome, which tells Snakemake that it is
there. In a Slurm job a run is not started if its time limit would outlast the job: it is left. The job ends
when Slurm says so (SLURM_JOB_END_TIME, since 22.05), else MINUTES from here.
"""

import hashlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from types import FrameType

from lowband.errors import UserError
from lowband.model.data import read_corpus
from lowband.run.ending import exit_code, report
from lowband.spec.files import write_whole
from lowband.spec.records import Environment, Outcome
from lowband.spec.run import RunSpec
from lowband.spec.run_folder import RunFolder

START_S = 60  # of a run, before its own clock: srun, imports


def has_ended(folder: RunFolder, spec: RunSpec | None = None) -> bool:
    """Whether the run of a spec, by default the folder's, ended with a row for the tables.

    One that was out of time may have been given more.
    """
    outcome = folder.read_outcome()
    if outcome is None or exit_code(outcome, folder):
        return False
    if outcome.of and outcome.status != "timeout":
        given = spec or RunSpec.read_json(folder.spec)
        is_same = outcome.status not in ("ok", "nan") or not _text_changed(folder, given)
        return outcome.of == given.training_sum and is_same
    if spec is not None and folder.spec.read_text() != spec.to_json():  # which is written before it runs
        return False
    return folder.outcome.stat().st_mtime_ns >= folder.spec.stat().st_mtime_ns


def _text_changed(folder: RunFolder, spec: RunSpec) -> bool:
    """Since the run; not where it, or the text, is unknown."""
    try:
        then = Environment.read_json(folder.env).data.get("sha256")
        return then is not None and then != _sum_of(spec.text)
    except UserError:
        return False


@cache
def _sum_of(text: str) -> str | int | float:
    return read_corpus(text).facts["sha256"]


def run_several(launch: Sequence[str], folders: Sequence[Path], logs: Path, ends: float) -> list[str]:
    """Run those that have not ended; a line for each that failed, and one for those that were left.

    launch: what starts a command as the ranks of the job; ends: of the job, on `time.monotonic`
    """
    wrong, left = [], 0
    for folder in map(RunFolder, folders):
        try:
            is_left, told = _one(launch, folder, logs, ends)
        except UserError as error:  # of its files alone: the others are still run
            is_left, told = False, str(error)
        left += is_left
        wrong += [f"{folder.path.name}: {told}"] if told else []
    return [*wrong, *([f"{left} of {len(folders)} runs left: the job's time is over"] if left else [])]


def _one(launch: Sequence[str], folder: RunFolder, logs: Path, ends: float) -> tuple[bool, str]:
    """Whether there was no time left for it, and what went wrong. Raises UserError for damaged files."""
    name = folder.path.name
    if not has_ended(folder):
        if time.monotonic() + START_S + RunSpec.read_json(folder.spec).time_limit_s > ends:
            return True, ""
        report(f"{name}: starts")
        code = _run([*launch, "python", "-m", "lowband", "train", str(folder.spec)], logs / f"{name}.log")
        if not has_ended(folder):
            return False, f"exit code {code}: {logs / name}.log"
    elif (ended := Outcome.read_json(folder.outcome)).status != "ok":
        report(f"{name}: ended before: {ended.status}: {ended.cause}")
    checksum = hashlib.sha256(folder.outcome.read_bytes()).hexdigest()
    write_whole(folder.trained, f"{checksum}  {folder.outcome}\n")
    return False, ""


def end_of_job(minutes: int, environment: Mapping[str, str]) -> float:
    """On `time.monotonic`. A job's own clock began before this process: with its prolog and the set-up."""
    if "SLURM_JOB_ID" not in environment:
        return float("inf")
    end = environment.get("SLURM_JOB_END_TIME", "")
    left = int(end) - time.time() if end.isdecimal() else 60 * minutes
    return time.monotonic() + left


def _run(command: Sequence[str], log: Path) -> int:
    """Run a command. SIGTERM is passed on to it, so that it records why it ends; then nothing else runs."""
    log.parent.mkdir(parents=True, exist_ok=True)
    told: list[int] = []
    running: list[subprocess.Popen[bytes]] = []

    def pass_on(order: int, _frame: FrameType | None) -> None:
        told.append(order)
        for process in running:
            process.terminate()

    before = signal.signal(signal.SIGTERM, pass_on)
    with log.open("ab") as file:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=file, stderr=file)
        running.append(process)
        if told:  # before it was one of those that are running
            process.terminate()
        code = process.wait()
        signal.signal(signal.SIGTERM, before)
    if told:
        sys.exit(128 + told[0])
    return code


def main(arguments: Sequence[str]) -> int:
    at = list(arguments).index("--")
    minutes, logs, *launch = arguments[:at]
    folders, ends = [Path(folder) for folder in arguments[at + 1 :]], end_of_job(int(minutes), os.environ)
    wrong = run_several(launch, folders, Path(logs), ends)
    for line in wrong:
        report(line)
    if wrong:
        report("the same command again continues with what is missing")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
