"""`python -m tests.random`: many cases of fixed seeds, one row for each; or one case by its seed.

python -m tests.random --cases 1000 --out results/reference/random/engine.csv
python -m tests.random --seed 17
python -m tests.random --cases 100 --exact before.json     and after.json at another commit, to compare: sums
                                                           of the bits of losses, norms, weights; bytes sent
"""

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path
from pprint import pprint

from tests import campaign_rows
from tests.random.cases import Case
from tests.random.draw import FEATURES, case
from tests.random.groups import Outcome, outcomes

COLUMNS = (
    "seed",
    "ranks",
    "levels",
    "schemes",
    "dtypes",
    "features",
    "outcome",
    "largest_difference",
    "seconds",
    "wrong",
    "commit",
)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.random", description=__doc__.split("\n")[0])
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--cases", type=int, help="run the seeds from --first on")
    which.add_argument("--seed", type=int, help="print one case and run it")
    parser.add_argument("--first", type=int, default=0, help="the first seed (default: 0)")
    parser.add_argument(
        "--without", nargs="*", choices=list(FEATURES), default=[], help="features to leave out"
    )
    parser.add_argument("--limit", type=float, default=60, help="seconds until a case counts as a hang")
    parser.add_argument("--out", type=Path, help="CSV file with a row for each case")
    parser.add_argument("--exact", type=Path, help="JSON file with a sum of the exact results of each case")
    options = parser.parse_args()
    seeds = [options.seed] if options.cases is None else range(options.first, options.first + options.cases)
    cases = [case(seed, frozenset(options.without)) for seed in seeds]
    if options.seed is not None:
        pprint(asdict(cases[0]), width=110, sort_dicts=False)
    rows, exact = [], {}
    for outcome in outcomes(cases, options.limit):
        rows.append(_row(outcome))
        exact[outcome.case.seed] = outcome.exact
        if outcome.wrong:
            print(f"seed {outcome.case.seed}: {outcome.wrong}", flush=True)
    rows.sort(key=lambda row: row["seed"])
    if options.out is not None:
        campaign_rows.write(options.out, COLUMNS, rows)
    if options.exact is not None:
        options.exact.write_text(json.dumps(dict(sorted(exact.items())), indent=1) + "\n", encoding="utf-8")
    failed = sum(row["outcome"] == "failed" for row in rows)
    print(f"{len(rows)} cases, {failed} failed")
    return min(failed, 1)


def _row(outcome: Outcome) -> dict[str, object]:
    drawn = outcome.case
    return {
        "seed": drawn.seed,
        "ranks": drawn.ranks,
        "levels": " ".join(f"{name}={size}" for name, size in drawn.inner) or "world",
        "schemes": " + ".join(_placement(drawn, i) for i in range(len(drawn.nets))),
        "dtypes": f"{drawn.compute_dtype} {drawn.reduce_dtype}",
        "features": " ".join(drawn.features),
        "outcome": "failed" if outcome.wrong else "ok" if drawn.is_exact else "ok within bound",
        "largest_difference": f"{outcome.largest:.3g}",
        "seconds": f"{outcome.seconds:.2f}",
        "wrong": outcome.wrong,
        "commit": campaign_rows.commit(),
    }


def _placement(drawn: Case, net: int) -> str:
    """weights (secondary) / grads / optim"""
    scheme = drawn.nets[net].scheme
    second = "" if scheme.secondary is None else f" ({scheme.secondary})"
    return f"{scheme.weights}{second}/{scheme.grads}/{scheme.optim}"


if __name__ == "__main__":
    sys.exit(main())
