"""`python -m tests.stragglers`: runs with a slow rank or link, and clean ones, from fixed seeds. Needs root.

python -m tests.stragglers --trials 100 --out results/reference/stragglers
python -m tests.stragglers --seed 17

Of each seed one run has a fault and one has none. A trial is right if the run's outcome names what is slow
and nothing else. Rows that the folder has already are kept.
"""

import argparse
import sys
import time
from collections import Counter
from itertools import product
from multiprocessing.connection import wait
from pathlib import Path
from statistics import median

from lowband.box import links
from lowband.spec.records import Outcome, StepRecord
from tests.campaign_rows import Rows, write_environment
from tests.stragglers.draw import Trial, trial
from tests.stragglers.trial import Running, is_right

AT_ONCE = 5  # computation is paced: they mostly wait
TRIES = 3
COLUMNS = (
    "seed", "kind", "victim", "level", "factor", "scheme", "ranks", "node", "named", "is_right", "real_share",
    "seconds", "commit",
)  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.stragglers", description=__doc__.split("\n")[0])
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--trials", type=int, help="the seeds 0 to N - 1, each with a fault and without")
    which.add_argument("--seed", type=int, help="one of them")
    parser.add_argument("--out", type=Path, help="folder of trials.csv, env.json")
    options = parser.parse_args()
    if reason := links.missing():
        print(f"no slow links: {reason}")
        return 2
    rows = Rows(options.out and options.out / "trials.csv", COLUMNS, ("seed", "kind"))
    if options.out:
        write_environment(options.out)
    seeds = [options.seed] if options.trials is None else range(options.trials)
    drawn = [trial(*each) for each in product(seeds, (True, False))]
    left = [each for each in drawn if not rows.has(each.seed, each.kind)]
    running: list[Running] = []
    tried: Counter[Trial] = Counter()
    while left or running:
        while left and len(running) < AT_ONCE:
            running.append(Running(left.pop(0)))
        wait([each.process.sentinel for each in running], timeout=1)
        for each in [one for one in running if one.has_ended]:
            running.remove(each)
            outcome, steps = each.end()
            tried[each.trial] += 1
            if outcome.status == "overloaded" and tried[each.trial] < TRIES:  # its pace did not hold
                left.append(each.trial)
                continue
            print(*rows.add(_row(each, outcome, steps)).values(), sep=" | ", flush=True)
    return int(any(str(row["is_right"]) != "True" for row in rows))


def _row(run: Running, outcome: Outcome, steps: list[StepRecord]) -> dict[str, object]:
    drawn, is_ok = run.trial, outcome.status == "ok"
    named = " / ".join(map(str, outcome.slow)) if is_ok else f"{outcome.status}: {outcome.cause}"
    return {
        "seed": drawn.seed, "kind": drawn.kind, "victim": " ".join(map(str, drawn.victim)),
        "level": drawn.level, "factor": drawn.factor, "scheme": drawn.scheme, "ranks": drawn.ranks,
        "node": drawn.node, "named": named,
        "is_right": is_ok and is_right(drawn, outcome.slow),
        "real_share": f"{median(step.real_share or 0.0 for step in steps):.2f}" if steps else "",
        "seconds": f"{time.monotonic() - run.started:.1f}",
    }  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
