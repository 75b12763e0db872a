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

from tests.faults.table import rows_of

sys.path.insert(0, str(Path(__file__).parents[1] / "dist"))

from quorum_jobs import EVERY, Jobs, check

FIRST_SEED = 2000
REPLICAS, RANKS, STEPS, STEP_S = 3, 2, 240, 0.1
PATIENCE_S, PEER_TIMEOUT_S, PROMPT_S = 10.0, 8.0, 30.0
KINDS = ("kill rank of a replica", "freeze rank of a replica", "kill it again as it joins")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.faults.of_replicas")
    parser.add_argument("--cases", type=int, required=True)
    parser.add_argument("--out", type=Path, required=True, help="folder of injected.csv")
    options = parser.parse_args()
    rows = rows_of(options.out)
    for seed in range(FIRST_SEED, FIRST_SEED + options.cases):
        if rows.has(seed):
            continue
        row = rows.add(case(seed))
        print(seed, row["kind"], row.get("detected_s"), row["wrong"] or "right", sep=" | ", flush=True)
    return int(any(row["wrong"] for row in rows))


def case(seed: int) -> dict[str, object]:
    draw, start = random.Random(seed), time.monotonic()
    kind = KINDS[(seed - FIRST_SEED) % len(KINDS)]
    victim, rank = draw.randrange(REPLICAS), draw.randrange(RANKS)
    row: dict[str, object] = {
        "seed": seed, "kind": kind, "scheme": "diloco", "ranks": REPLICAS * RANKS, "exit_code": 1,
        "victim": RANKS * victim + rank,
    }  # fmt: skip
    try:
        row |= observed(draw, kind, victim, rank)
    except AssertionError as error:  # a replica ended that should not have
        row["wrong"] = str(error).splitlines()[-1]
    return row | {"seconds": f"{time.monotonic() - start:.1f}"}


def observed(draw: random.Random, kind: str, victim: int, rank: int) -> dict[str, object]:
    with tempfile.TemporaryDirectory() as name:
        jobs = Jobs(
            Path(name), ranks=RANKS, steps=STEPS, step_s=STEP_S, patience_s=PATIENCE_S,
            peer_timeout_s=PEER_TIMEOUT_S,
        )  # fmt: skip
        try:
            for replica in range(REPLICAS):
                jobs.start(replica)
            jobs.wait_for("0.0/record")
            time.sleep(draw.uniform(0, 3))
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
    try:
        check(found, RANKS)
        same_weights = True
    except AssertionError:
        same_weights = False
    others = [seen[0] for replica, seen in found.items() if replica != victim]
    ends = [str(step) for step in range(EVERY, STEPS + 1, EVERY)]
    same_steps = all(list(seen["members"]) == ends for seen in others)
    at, members = others[0]["at"], others[0]["members"]
    detected_s = min(at[end] for end in ends if victim not in members[end]) - moment
    wrong = {
        f"detected after {detected_s:.1f} s": detected_s > PROMPT_S,
        "the others lost a step": not same_steps,
        "other weights than in one process": not same_weights,
        f"in the end replicas {members[ends[-1]]}": members[ends[-1]] != list(range(REPLICAS)),
    }
    return {
        "step": max((int(end) for end in ends if at[end] < moment), default=0),
        "detected_s": f"{detected_s:.2f}", "printed": printed, "resumed_from": found[victim][0]["began"],
        "same_weights": same_weights, "same_steps": same_steps,
        "wrong": "; ".join(text for text, is_so in wrong.items() if is_so),
    }  # fmt: skip


def signal_rank(jobs: Jobs, replica: int, rank: int, order: signal.Signals) -> None:
    ranks = sorted(psutil.Process(jobs.pid(replica)).children(), key=lambda each: each.create_time())
    ranks[rank].send_signal(order)


if __name__ == "__main__":
    sys.exit(main())
