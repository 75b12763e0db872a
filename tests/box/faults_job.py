"""Run in a box: trains through Snakemake and Slurm, ends jobs in every bad way, and runs the workflow again.

usage: faults_job.py [SEED [HOW ...]], in a tree with the suite `faults` and a node for each HOW.
SEED: which job gets which fault, and when. HOW: failed, cancelled, timed_out, lost (default: all four).
Prints one JSON object.
"""

import json
import os
import random
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import psutil
from commands import WORKFLOW

from lowband.box import links
from lowband.spec.records import Outcome
from lowband.spec.run_folder import RunFolder

RUNS = Path("results/faults/runs")
HOWS = ("failed", "cancelled", "timed_out", "lost")
STEPS_FIRST = 4  # a checkpoint is there
WAIT_S = 900
LONGEST_S = 1200  # of a workflow, beside other tests
LIMIT_S = 60  # Slurm counts in minutes
RUNNING = ("RUNNING", "COMPLETING")


def jobs() -> dict[str, tuple[str, str]]:
    """Run -> Slurm job and node, of the jobs that run."""
    command = ["squeue", "-h", "-t", "running", "-o", "%i %N %k"]
    lines = subprocess.run(command, capture_output=True, text=True, timeout=300).stdout.splitlines()
    found = {}
    for line in lines:
        job, node, comment = line.split(maxsplit=2)
        for run in RUNS.iterdir():
            if run.name in comment:
                found[run.name] = (job, node)
    return found


def squeue(what: str, ids: list[str]) -> dict[str, str]:
    """A field of each of these jobs, ended ones too."""
    command = ["squeue", "-h", "-t", "all", "-j", ",".join(ids), "-o", f"%i {what}"]
    lines = subprocess.run(command, capture_output=True, text=True, timeout=300).stdout.splitlines()
    return dict(line.split(maxsplit=1) for line in lines)


def trains(run: str) -> bool:
    return RunFolder(RUNS / run).count_steps() >= STEPS_FIRST


def wait_for(condition, what: str) -> None:
    deadline = time.monotonic() + WAIT_S
    while not condition():
        if time.monotonic() > deadline:
            sys.exit(f"waited {WAIT_S:.0f} s for {what}")
        time.sleep(0.2)


def ranks(run: str) -> list[psutil.Process]:
    """The ranks of a node are children of its launcher and have its command line."""
    mine = [
        p for p in psutil.process_iter(["cmdline"]) if f"{RUNS / run}/spec.json" in (p.info["cmdline"] or [])
    ]
    pids, found = {p.pid for p in mine}, []
    for p in mine:
        with suppress(psutil.NoSuchProcess):  # it has ended since
            if p.ppid() in pids and "srun" not in p.info["cmdline"][0]:
                found.append(p)
    return found


def hold(runs: list[str]) -> None:
    """Stop each of these once it trains, so that none has ended before the last one trains."""
    to_come = set(runs)

    def are_held() -> bool:
        for run in filter(trains, list(to_come)):
            for rank in ranks(run):
                with suppress(psutil.NoSuchProcess):
                    rank.suspend()
            to_come.discard(run)
        return not to_come

    wait_for(are_held, f"{len(runs)} jobs to train")


def kill_a_node(node: str) -> None:
    """The daemon of the node and all that runs there."""
    for process in psutil.process_iter(["cmdline"]):
        arguments = process.info["cmdline"] or []
        if "-N" in arguments and arguments[-1] == node:
            process.kill()
    for namespace in links.namespaces():
        if namespace.startswith(f"lowband-{node}g"):
            for pid in links.processes(namespace):
                os.kill(pid, signal.SIGKILL)


def ended_at(ids: list[str], first: subprocess.Popen) -> dict[str, float]:
    """When Slurm knew the end of each job, by the monotonic clock; waits until all have ended."""
    found: dict[str, float] = {}
    deadline = time.monotonic() + WAIT_S
    while len(found) < len(ids) and first.poll() is None and time.monotonic() < deadline:
        for job, state in squeue("%T", ids).items():
            if state not in RUNNING:
                found.setdefault(job, time.monotonic())
        time.sleep(0.2)
    return found


def main() -> None:
    seed, *hows = sys.argv[1:] or ["0"]
    hows = hows or [*HOWS]
    chance = random.Random(int(seed))
    log = Path("first.log")
    with log.open("w") as file:
        first = subprocess.Popen(WORKFLOW, stdout=file, stderr=subprocess.STDOUT)
    wait_for(lambda: RUNS.exists() and len(jobs()) == len(hows), f"{len(hows)} jobs")
    running = sorted(jobs())
    hold(running)
    victim = dict(zip(hows, chance.sample(running, len(hows)), strict=True))
    now = jobs()
    for how, run in victim.items():
        for rank in ranks(run) if how != "timed_out" else []:  # it hangs
            with suppress(psutil.NoSuchProcess):
                rank.resume()
    time.sleep(chance.uniform(0, 5))
    ids = [now[run][0] for run in running]
    steps = {run: RunFolder(RUNS / run).count_steps() for run in running}
    late = {}  # until its limit is reached
    if "timed_out" in victim:
        minutes, seconds = squeue("%M", ids)[now[victim["timed_out"]][0]].split(":")
        late[victim["timed_out"]] = max(0.0, LIMIT_S - 60 * int(minutes) - int(seconds))
    started = time.monotonic()
    for how, run in victim.items():
        end(how, run, *now[run])
    ended = ended_at(ids, first)
    first_code = first.wait(timeout=LONGEST_S)
    detected_s = {
        run: round(ended[now[run][0]] - started - late.get(run, 0), 2)
        for run in running
        if now[run][0] in ended
    }
    causes = {run.name: outcome(run) for run in RUNS.iterdir()}
    again = subprocess.run(WORKFLOW, capture_output=True, text=True, timeout=LONGEST_S)
    print(json.dumps({
        **victim, "steps": steps, "detected_s": detected_s,
        "first_code": first_code, "first_log": log.read_text(), "causes": causes,
        "again_code": again.returncode, "again_log": again.stdout + again.stderr,
        "after": {run.name: outcome(run) for run in RUNS.iterdir()},
    }))  # fmt: skip


def end(how: str, run: str, job: str, node: str) -> None:
    if how == "failed":
        ranks(run)[0].kill()
    elif how == "cancelled":
        subprocess.run(["scancel", job], check=True, timeout=300)
    elif how == "timed_out":
        limit = ["scontrol", "update", f"JobId={job}", "TimeLimit=1"]
        subprocess.run(limit, check=True, timeout=300)
    else:
        kill_a_node(node)


def outcome(run: Path) -> dict[str, object] | None:
    file = RunFolder(run).outcome
    return Outcome.read_json(file).model_dump(mode="json") if file.exists() else None


if __name__ == "__main__":
    main()
