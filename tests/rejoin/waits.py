"""`python -m tests.rejoin.waits`: how long replicas wait for one that is killed, or stopped, and stays away.

python -m tests.rejoin.waits --out results/reference/rejoin

Three replicas of one rank, a process each, under lowband.Quorum. One of them ends, or stops, within a period.
A row per case; rows that the folder has already are kept.
"""

import argparse
import itertools
import json
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from tests.campaign_rows import Rows
from tests.rejoin.__main__ import REPLICAS, begun, meeting_point

EVERY, EXCHANGES, STEP_S, AT = 5, 8, 0.03, 17  # AT: step of replica 1
PATIENCE_S, SIGNALS = (3.0, 6.0, 12.0), ("SIGKILL", "SIGSTOP")
COLUMNS = ("patience_s", "signal", "seed", "longest_wait_s", "exchanges_without", "steps", "commit")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.rejoin.waits")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    rows = Rows(options.out / "waits.csv", COLUMNS, ("patience_s", "signal", "seed"))
    for case in itertools.product(PATIENCE_S, SIGNALS, range(options.seeds)):
        if not rows.has(*case):
            print(*rows.add(waited(*case)).values(), sep=" | ", flush=True)
    return 0


def waited(patience_s: float, signal: str, seed: int) -> dict[str, Any]:
    """Of the other two: the longest time from one exchange to the next, beyond the median."""
    with tempfile.TemporaryDirectory() as name, meeting_point("lowband") as address:
        common = {
            "system": "lowband", "address": address, "replicas": REPLICAS, "every": EVERY, "seed": seed,
            "exchanges": EXCHANGES, "patience_s": patience_s, "step_s": STEP_S, "signal": signal,
        }  # fmt: skip
        folder = Path(name)
        running = [
            begun(folder, {**common, "replica": replica, "dies": AT if replica == 1 else None})
            for replica in range(REPLICAS)
        ]
        others = running[0], running[2]
        try:
            ends = [process.wait(timeout=200) for process in others]
            if any(ends):
                sys.exit(f"replicas ended with {ends}")
        finally:
            for process in running:
                process.kill()
        found = [json.loads((folder / f"{replica}.json").read_text()) for replica in (0, 2)]
    times = [[each["at"] for each in seen["exchanges"].values()] for seen in found]
    between = [later - earlier for of_one in times for earlier, later in itertools.pairwise(of_one)]
    return {
        "patience_s": patience_s, "signal": signal, "seed": seed,
        "longest_wait_s": f"{max(between) - statistics.median(between):.2f}",
        "exchanges_without": sum(each["replicas"] < REPLICAS for each in found[0]["exchanges"].values()),
        "steps": found[0]["steps"],
    }  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
