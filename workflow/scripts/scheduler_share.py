"""Processor time of Snakemake's own process during runs. From the root: scheduler_share.py OUT.csv

In a copy of the tree each run of the suite `default` sleeps for three seconds; the process's time is read
every ten seconds. --job-limit keeps Snakemake's default limit on job starts, which run.smk removes.
"""

import argparse
import csv
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

PARTS = ("Snakefile", "workflow", "config", "envs", "slurm", "src", "results/reported", "results/reference")
SLEEP = """#!/bin/sh
for word in "$@"; do case $word in */spec.json) run=${word%/*};; esac; done
sleep 3
echo "$run" > "$run/outcome.json"
"""
INTERVAL_S = 10.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--job-limit", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder)
        for part in PARTS:
            source = Path(part)
            (shutil.copytree if source.is_dir() else shutil.copy2)(source, tree / part)
        (tree / "slurm" / "launch.sh").write_text(SLEEP)
        if options.job_limit:
            rules = tree / "workflow" / "rules" / "run.smk"
            rules.write_text(rules.read_text().replace("workflow.scheduler.job_rate_limiter = None", "pass"))
        rows = list(_samples(tree))
    with options.out.open("w", newline="") as file:
        csv.writer(file, lineterminator="\n").writerows([("runs_done", "percent_of_a_core"), *rows])


def _samples(tree: Path) -> Iterator[tuple[int, str]]:
    """(runs that have ended, percent of a core that Snakemake's process took) every INTERVAL_S."""
    command = [
        "-m",
        "snakemake",
        "--cores",
        "2",
        "--until",
        "train",
        "--config",
        "suites=[default]",
        "results=share",
    ]
    process = subprocess.Popen(
        [sys.executable, *command],
        cwd=tree,
        env={**os.environ, "PYTHONPATH": str(tree / "src")},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    began, spent = time.monotonic(), _cpu_s(process.pid)
    while process.poll() is None:
        time.sleep(INTERVAL_S)
        if process.poll() is not None:
            return
        now, cpu = time.monotonic(), _cpu_s(process.pid)
        done = len(list(tree.glob("results/share/runs/*/trained")))
        yield done, f"{100 * (cpu - spent) / (now - began):.1f}"
        began, spent = now, cpu


def _cpu_s(pid: int) -> float:
    """User and system time of the process itself, without its children."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


if __name__ == "__main__":
    main()
