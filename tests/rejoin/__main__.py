"""`python -m tests.rejoin`: DiLoCo of lowband.Quorum and of torchft, undisturbed and with a replica killed.

pip install torchft; python -m tests.rejoin --out results/reference/rejoin

Three replicas of one rank, a process each. In a third of the cases nothing happens; in the others replica 1
is killed by SIGKILL within a period, and started again by the same command. A row per case. Rows that the
folder has already are kept.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch.distributed as dist

from tests.campaign_rows import Rows, write_environment

SYSTEMS = ("lowband", "torchft")
REPLICAS, EVERY, EXCHANGES, PATIENCE_S, STEP_S = 3, 10, 16, 20.0, 0.03
DIES_AT = (None, 35, 67)  # step of replica 1
LAST = 4  # exchanges, of whose periods a loss is the mean, over replicas 0 and 2
COLUMNS = (
    "system", "dies_at", "seed", "loss", "others_steps", "steps", "longest_wait_s", "exchanges_without",
    "began_again", "same_weights", "same_outer", "seconds", "commit",
)  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.rejoin")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    rows = Rows(options.out / "rejoin.csv", COLUMNS, ("system", "dies_at", "seed"))
    write_environment(options.out, "loopback")
    for seed in range(options.seeds):
        for dies_at in DIES_AT:
            for system in SYSTEMS:
                if not rows.has(system, dies_at or "", seed):
                    print(*rows.add(case(system, dies_at, seed)).values(), sep=" | ", flush=True)
    return 0


def case(system: str, dies_at: int | None, seed: int) -> dict[str, Any]:
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as name, meeting_point(system) as address:
        common = {
            "system": system, "address": address, "replicas": REPLICAS, "every": EVERY, "seed": seed,
            "exchanges": EXCHANGES, "patience_s": PATIENCE_S, "step_s": STEP_S,
        }  # fmt: skip
        folder = Path(name)
        running = [
            begun(folder, {**common, "replica": replica, "dies": dies_at if replica == 1 else None})
            for replica in range(REPLICAS)
        ]
        if dies_at is not None:
            running[1].wait(timeout=200)
            running[1] = begun(folder, {**common, "replica": 1})
        for process in running:
            if process.wait(timeout=200):
                sys.exit(f"{system}: a replica ended with {process.returncode}")
        found = [json.loads((folder / f"{replica}.json").read_text()) for replica in range(REPLICAS)]
    others = [found[0], found[2]]
    waits = [
        later["at"] - earlier["at"]
        for seen in others
        for earlier, later in zip(*(list(seen["exchanges"].values())[i:] for i in (0, 1)), strict=False)
    ]
    return {
        "system": system, "dies_at": "" if dies_at is None else dies_at, "seed": seed,
        "loss": statistics.mean(loss for seen in others for loss in seen["losses"][-LAST * EVERY :]),
        "others_steps": max(seen["steps"] for seen in others), "steps": EVERY * EXCHANGES,
        "longest_wait_s": f"{max(waits) - statistics.median(waits):.2f}",
        "exchanges_without": sum(each["replicas"] < REPLICAS for each in found[0]["exchanges"].values()),
        "began_again": found[1]["began"] if dies_at is not None else "",
        "same_weights": len({seen["weights"] for seen in found}) == 1,
        "same_outer": len({seen["outer"] for seen in found}) == 1,
        "seconds": f"{time.monotonic() - start:.1f}",
    }  # fmt: skip


def begun(folder: Path, options: dict[str, Any]) -> subprocess.Popen[bytes]:
    """A replica, as a process of its own."""
    out = folder / f"{options['replica']}.json"
    file = folder / f"{options['replica']}.options.json"
    file.write_text(json.dumps({**options, "out": str(out)}))
    command = [sys.executable, str(Path(__file__).with_name("worker.py")), str(file)]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


@contextmanager
def meeting_point(system: str) -> Iterator[str]:
    """Where replicas meet: lowband's store, or torchft's lighthouse."""
    if system == "lowband":
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        yield f"127.0.0.1:{store.port}"
        return
    from torchft.coordination import LighthouseServer

    lighthouse = LighthouseServer(
        bind="127.0.0.1:0", min_replicas=REPLICAS - 1, join_timeout_ms=int(1000 * PATIENCE_S)
    )
    try:
        yield f"http://127.0.0.1:{lighthouse.address().rpartition(':')[2]}"
    finally:
        lighthouse.shutdown()


if __name__ == "__main__":
    sys.exit(main())
