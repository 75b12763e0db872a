"""`python -m tests.shaky`: tests again and again on a busy machine, a row for each group and round.

python -m tests.shaky --rounds 10 --loops 4 --at-once 4 --out build/shaky
python -m tests.shaky --rounds 2 --loops 2 --fast --out build/shaky

Loops that do nothing but compute run beside the tests, at the same priority, and so do `--at-once` groups
beside each other. Tests that time real messages run with `--fast` only, as `make test` runs them: beside such
alone, each with a second try. Rows that the folder has already are kept: a campaign that was cut goes on.
"""

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from pathlib import Path

from tests.campaign_rows import Rows
from tests.junit import counted
from tests.shaky.groups import FORMERLY_FRAGILE

COLUMNS = ["round", "loops", "at_once", "group", "tests", "skipped", "failed", "which", "seconds", "commit"]
ONE_PROCESS = ["--wide", "-m", "not timed"]
# Ends with the campaign, however that ends.
LOOP = """
import os, sys
while os.getppid() == int(sys.argv[1]):
    for _ in range(10**6):
        pass
"""
_BY_FILE = ["--dist", "loadfile", "--no-loadscope-reorder", "-m"]
FAST = {
    "the fast part": ["-n", "2", *_BY_FILE, "not slow and not waits and not timed"],
    "the timed part": ["-n", "3", *_BY_FILE, "timed"],
}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.shaky", description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, required=True, help="how often each group runs")
    parser.add_argument("--loops", type=int, required=True, help="busy loops beside the tests")
    parser.add_argument("--at-once", type=int, default=1, help="groups that run beside each other (1)")
    parser.add_argument(
        "--fast", action="store_true", help="all tests that are not slow, then those that time messages"
    )
    parser.add_argument("--out", type=Path, required=True, help="folder of rounds.csv")
    options = parser.parse_args()
    rows = Rows(options.out / "rounds.csv", COLUMNS, ("round", "loops", "group"))
    groups = FAST if options.fast else {k: [*ONE_PROCESS, *v] for k, v in FORMERLY_FRAGILE.items()}
    todo = [
        (at, group)
        for at in range(options.rounds)
        for group in groups
        if not rows.has(at, options.loops, group)
    ]
    pool = ThreadPoolExecutor(options.at_once)
    with busy(options.loops):
        try:
            running = {pool.submit(tried, groups[group]): (at, group) for at, group in todo}
            for ended in as_completed(running):
                at, group = running[ended]
                beside = {"round": at, "loops": options.loops, "at_once": options.at_once, "group": group}
                print(*rows.add(beside | ended.result()).values(), sep=" | ", flush=True)
        finally:  # what cannot be run ends the campaign, not after all others
            pool.shutdown(cancel_futures=True)
    return int(any(int(row["failed"]) for row in rows))


@contextmanager
def busy(loops: int) -> Iterator[None]:
    """So many processes that compute without end."""
    running = [subprocess.Popen([sys.executable, "-c", LOOP, str(os.getpid())]) for _ in range(loops)]
    try:
        yield
    finally:
        for process in running:
            process.kill()
            process.wait()


def tried(arguments: list[str]) -> dict[str, object]:
    """Counts of one pytest, and its time."""
    start = time.monotonic()
    return {**counted(arguments), "seconds": f"{time.monotonic() - start:.0f}"}


if __name__ == "__main__":
    sys.exit(main())
