"""`python -m tests.faults`: faults of every kind at random moments of real runs, from fixed seeds.

python -m tests.faults --cases 200 --out results/reference/faults
python -m tests.faults --seed 17

After each fault the same command is given again. A case is right if the run ended within 30 s of its fault,
by the exit code and the one line that the fault calls for, recorded its outcome, and in the end has the
weights and the steps of an undisturbed run, bit by bit. Rows that the folder has already are kept.
"""

import argparse
import sys
import time
from pathlib import Path

from lowband.box import links
from tests.campaign_rows import write_environment
from tests.faults.draw import case
from tests.faults.kinds import KINDS, ON_A_DISK, ON_LINKS
from tests.faults.table import rows_of
from tests.faults.trial import Result, trial

PROMPT_S = 30.0  # by then a fault must be detected


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.faults", description=__doc__.split("\n")[0])
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--cases", type=int, help="the seeds 0 to N - 1")
    which.add_argument("--seed", type=int, help="one case")
    parser.add_argument("--kinds", nargs="*", choices=list(KINDS), help="these only")
    parser.add_argument("--out", type=Path, help="folder of injected.csv, env.json")
    options = parser.parse_args()
    kinds = options.kinds or possible_kinds()
    seeds = [options.seed] if options.cases is None else range(options.cases)
    rows = rows_of(options.out)
    if options.out:
        write_environment(options.out)
    for seed in seeds:
        if rows.has(seed):
            continue
        start = time.monotonic()
        row = _row(trial(case(seed, kinds)), time.monotonic() - start)
        rows.add(row)
        print(*row.values(), sep=" | ", flush=True)
    return int(any(row["wrong"] for row in rows))


def possible_kinds() -> list[str]:
    """Without what this machine cannot do: disks and links of one's own need root."""
    reason = links.missing()
    if not reason:
        return list(KINDS)
    print(f"no faults of disks and links: {reason}")
    return [name for name, kind in KINDS.items() if kind not in (*ON_A_DISK, *ON_LINKS)]


def _row(result: Result, seconds: float) -> dict[str, object]:
    """A fault that is detected late is wrong here: the campaign alone asks when, no test does."""
    case, seen = result.case, result.seen
    late = f"detected after {seen.detected_s:.0f} s" if (seen.detected_s or 0) > PROMPT_S else ""
    return {
        "seed": case.seed, "kind": case.kind, "scheme": case.scheme, "ranks": case.ranks, "step": case.step,
        "victim": case.victim, "detected_s": "" if seen.detected_s is None else f"{seen.detected_s:.2f}",
        "exit_code": seen.code, "printed": " / ".join(seen.lines),
        "printed_again": " / ".join(result.lines_again),
        "resumed_from": "" if result.resumed_from is None else result.resumed_from,
        "same_weights": result.same_weights, "same_steps": result.same_steps, "seconds": f"{seconds:.1f}",
        "wrong": "; ".join(part for part in (result.wrong, late) if part),
    }  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
