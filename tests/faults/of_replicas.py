"""`python -m tests.faults.of_replicas`: ranks of replicas that are jobs of their own, killed and frozen.

python -m tests.faults.of_replicas --cases 24 --out results/reference/faults

Three replicas of two ranks each train under DiLoCo (lowband.Quorum). At a random moment a rank of one is
killed, or frozen. Its job ends, and is started again by the same command; in every third case it is killed
once more at a random moment while it joins. A case is right if the others made every step and were without
that replica within PROMPT_S, and if it joined them, and all replicas have after every exchange the weights of
the same training in one process, bit by bit. Rows go into the campaign's table, from FIRST_SEED on.
"""

import argparse
import random
import signal
import sys
import tempfile
import time
from pathlib import Path

import psutil

from lowband.run.environment import code_version
from tests.faults.table import read, write

sys.path.insert(0, str(Path(__file__).parents[1] / "dist"))

from quorum_jobs import EVERY, Jobs, check

FIRST_SEED = 2000
REPLICAS, RANKS, STEPS, STEP_S = 3, 2, 90, 0.1
PATIENCE_S, PEER_TIMEOUT_S, PROMPT_S = 10.0, 8.0, 30.0
KINDS = ("kill rank of a replica", "freeze rank of a replica", "kill it again as it joins")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.faults.of_replicas")
    parser.add_argument("--cases", type=int, required=True)
    parser.add_argument("--out", type=Path, required=True, help="folder of injected.csv")
    options = parser.parse_args()
    rows = read(options.out)
    done = {int(str(row["seed"])) for row in rows}
    options.out.mkdir(parents=True, exist_ok=True)
    for seed in range(FIRST_SEED, FIRST_SEED + options.cases):
        if seed in done:
            continue
        row = case(seed)
        print(*row.values(), sep=" | ", flush=True)
        rows.append(row)
        write(options.out, rows)
    return int(any(row["wrong"] for row in rows))


def case(seed: int) -> dict[str, object]:
    draw, start = random.Random(seed), time.monotonic()
    kind = KINDS[(seed - FIRST_SEED) % len(KINDS)]
    victim, rank = draw.randrange(REPLICAS), draw.randrange(RANKS)
    others = [replica for replica in range(REPLICAS) if replica != victim]
    with tempfile.TemporaryDirectory() as name:
        jobs = Jobs(
            Path(name), ranks=RANKS, steps=STEPS, step_s=STEP_S, patience_s=PATIENCE_S,
            peer_timeout_s=PEER_TIMEOUT_S,
        )  # fmt: skip
        try:
            for replica in range(REPLICAS):
                jobs.start(replica)
            jobs.wait_for("0.0/record")
            time.sleep(draw.uniform(0, STEPS * STEP_S / 3))
            moment = time.monotonic()
            signal_rank(jobs, victim, rank, signal.SIGSTOP if "freeze" in kind else signal.SIGKILL)
            printed = jobs.ended(victim).splitlines()[-1]
            jobs.start(victim)
            if "again" in kind:
                time.sleep(draw.uniform(0, 8))
                jobs.kill(victim)
                jobs.start(victim)
            found = {replica: jobs.seen(replica) for replica in range(REPLICAS)}
        finally:
            jobs.end()
    steps = [str(step) for step in range(EVERY, STEPS + 1, EVERY)]
    without = [found[others[0]][0]["at"][s] for s in steps if victim not in found[others[0]][0]["members"][s]]
    detected_s = min(without) - moment if without else None
    same_steps = all(list(found[replica][0]["members"]) == steps for replica in others)
    try:
        check(found, RANKS)
        same_weights = True
    except AssertionError:
        same_weights = False
    last = found[others[0]][0]["members"][steps[-1]]
    wrong = [
        *([] if detected_s is not None and detected_s <= PROMPT_S else [f"detected after {detected_s} s"]),
        *([] if same_steps else ["the others lost a step"]),
        *([] if same_weights else ["other weights than in one process"]),
        *([] if last == list(range(REPLICAS)) else [f"in the end there were replicas {last}"]),
    ]
    commit, is_dirty = code_version()
    return {
        "seed": seed, "kind": kind, "scheme": "diloco", "ranks": REPLICAS * RANKS,
        "step": max((int(s) for s, at in found[others[0]][0]["at"].items() if at < moment), default=0),
        "victim": RANKS * victim + rank, "exit_code": 1,
        "detected_s": None if detected_s is None else f"{detected_s:.2f}", "printed": printed,
        "printed_again": "", "resumed_from": found[victim][0]["began"], "same_weights": same_weights,
        "same_steps": same_steps, "seconds": f"{time.monotonic() - start:.1f}", "wrong": "; ".join(wrong),
        "commit": commit + ("-dirty" if is_dirty else ""),
    }  # fmt: skip


def signal_rank(jobs: Jobs, replica: int, rank: int, order: signal.Signals) -> None:
    ranks = sorted(psutil.Process(jobs.pid(replica)).children(), key=lambda each: each.create_time())
    ranks[rank].send_signal(order)


if __name__ == "__main__":
    sys.exit(main())
