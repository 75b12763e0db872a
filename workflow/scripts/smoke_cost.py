"""Processor time of each step of `make smoke`. From the root: smoke_cost.py OUT.csv

The suite runs into a folder of its own, results/smoke-cost. Every Python process writes, as it ends, the user
and system time of itself and of the children that it waited for: forked ranks count with `train`, and all
processes once more with `snakemake`. The last row is all that the command took, and its wall time.
"""

import argparse
import csv
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path

# Python imports a module of this name as it starts.
AT_END = """
import atexit, os, sys
def write():
    times = os.times()
    words = sys.orig_argv
    at = words.index("-m") + 1 if "-m" in words else 1
    name = words[at]
    step = words[at + 1] if name == "lowband" and at + 1 < len(words) else os.path.basename(name)
    with open(os.path.join(os.environ["COST_FOLDER"], str(os.getpid())), "a") as file:
        file.write(f"{step} {sum(times[:4])}\\n")
atexit.register(write)
"""
ALL = "everything that was started"
SMOKE = ("-m", "snakemake", "--cores", "2", "--config", "suites=[smoke]", "results=smoke-cost")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    options = parser.parse_args()
    start = time.monotonic()
    *steps, everything = cost([sys.executable, *SMOKE])
    wall = round(time.monotonic() - start, 1)
    header = "step", "processes", "processor_time_s", "wall_time_s"
    with options.out.open("w", newline="") as file:
        rows = [header, *((*step, None) for step in steps), (*everything, wall)]
        csv.writer(file, lineterminator="\n").writerows(rows)


def cost(command: list[str]) -> list[tuple[str, int | None, float]]:
    """(step, its processes, their processor time in seconds) of a command, the longest first; then ALL."""
    before = _of_children()
    times: dict[str, list[float]] = defaultdict(list)
    with tempfile.TemporaryDirectory() as code, tempfile.TemporaryDirectory() as ended:
        (Path(code) / "sitecustomize.py").write_text(AT_END)
        path = os.pathsep.join(filter(None, (code, os.environ.get("PYTHONPATH"))))
        subprocess.run(command, check=True, env={**os.environ, "PYTHONPATH": path, "COST_FOLDER": ended})
        for file in Path(ended).iterdir():
            for line in file.read_text().splitlines():
                step, seconds = line.rsplit(" ", 1)
                times[step].append(float(seconds))
    rows = [(step, len(each), round(sum(each), 1)) for step, each in times.items()]
    rows.sort(key=lambda row: -row[2])
    return [*rows, (ALL, None, round(_of_children() - before, 1))]


def _of_children() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


if __name__ == "__main__":
    main()
