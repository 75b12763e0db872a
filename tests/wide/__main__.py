"""`python -m tests.wide`: many cases of fixed seeds, one row for each; or one case by its seed.

python -m tests.wide --cases 300 --out results/reference/random/wide.csv
python -m tests.wide --seed 17

Seeds that the file has are not run again: what was cut goes on.
"""

import argparse
import sys
from dataclasses import asdict, fields
from pathlib import Path
from pprint import pprint
from typing import Any

from tests.campaign_rows import Rows
from tests.wide.cases import Case
from tests.wide.draw import case
from tests.wide.trials import Outcome, quiet, tried

DRAWN = [field.name for field in fields(Case)]
COLUMNS = [*DRAWN, "outcome", "largest_difference", "said", "wrong", "seconds", "commit"]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.wide", description=__doc__.split("\n")[0])
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--cases", type=int, help="run the seeds from --first on")
    which.add_argument("--seed", type=int, help="print one case and run it")
    parser.add_argument("--first", type=int, default=0, help="the first seed (default: 0)")
    parser.add_argument("--limit", type=float, default=60, help="seconds until a case counts as a hang")
    parser.add_argument("--out", type=Path, help="CSV file with a row for each case")
    options = parser.parse_args()
    if options.seed is not None:
        drawn = case(options.seed)
        pprint(asdict(drawn), width=110, sort_dicts=False)
        outcome = tried(drawn, options.limit)
        print(outcome.outcome, outcome.largest, outcome.said, f"{outcome.seconds:.1f} s", sep=" | ")
        return int(bool(outcome.wrong))
    rows = Rows(options.out, COLUMNS)
    for seed in range(options.first, options.first + options.cases):
        if rows.has(seed):
            continue
        with quiet():
            outcome = tried(case(seed), options.limit)
        rows.add(_row(outcome))
        if outcome.wrong:
            print(f"seed {seed}: {outcome.wrong}", flush=True)
    wrong = [bool(row["wrong"]) for row in rows]
    print(f"{len(wrong)} cases, {sum(wrong)} wrong")
    return int(any(wrong))


def _row(outcome: Outcome) -> dict[str, Any]:
    return {name: _text(value) for name, value in asdict(outcome.case).items()} | {
        "outcome": outcome.outcome,
        "largest_difference": "" if outcome.largest is None else f"{outcome.largest:.2g}",
        "said": outcome.said,
        "wrong": outcome.wrong,
        "seconds": f"{outcome.seconds:.2f}",
    }


def _text(value: Any) -> Any:
    """A cell: True as "yes", the levels and an own module in words."""
    if isinstance(value, bool):
        return "yes" if value else ""
    if isinstance(value, dict):
        return " ".join(f"{name}={_text(each)}" for name, each in value.items())
    if isinstance(value, tuple):
        return " ".join(f"{name}={size}" for name, size in value)
    return "" if value is None else value


if __name__ == "__main__":
    sys.exit(main())
