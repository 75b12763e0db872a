"""`python -m tests.faults.under_slurm`: jobs of a workflow that end in every bad way Slurm knows, in a box.

python -m tests.faults.under_slurm --rounds 3 --out results/reference/faults

A round starts `snakemake --profile slurm` with five jobs on four nodes, kills a rank of one, cancels one,
lets one run out of time and loses the node of one; the fifth is left alone. Then the same command again.
A case is right if Slurm's status was printed, the job resumed, and its run has the weights and losses of one
without Slurm, undisturbed. Needs root and Slurm. Rows go into the campaign's table, from FIRST_SEED on.
"""

import argparse
import json
import sys
import tempfile
import time
from functools import cache
from pathlib import Path

from lowband.spec.run_folder import RunFolder

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tests" / "box"))

from commands import copy_tree, lowband  # noqa: E402

from tests.faults.table import rows_of  # noqa: E402

FIRST_SEED = 1000
JOB = ROOT / "tests" / "box" / "faults_job.py"
RUNS = Path("results/faults/runs")
STATUS = {"failed": "FAILED", "cancelled": "CANCELLED", "timed_out": "TIMEOUT", "lost": "NODE_FAIL"}
KIND = {
    "failed": "Slurm: kill rank of a job", "cancelled": "Slurm: cancel a job",
    "timed_out": "Slurm: time limit of a job", "lost": "Slurm: lose a job's node",
}  # fmt: skip
PROMPT_S = 90.0  # Slurm looks at nodes and limits at intervals of half a minute


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.faults.under_slurm")
    parser.add_argument("--rounds", type=int, required=True)
    parser.add_argument("--out", type=Path, required=True, help="folder of injected.csv")
    options = parser.parse_args()
    rows = rows_of(options.out)
    for turn in range(options.rounds):
        first = FIRST_SEED + len(STATUS) * turn
        if rows.has(first):
            continue
        for row in _round(turn, first):
            print(*rows.add(row).values(), sep=" | ", flush=True)
    return int(any(row["wrong"] for row in rows))


def _round(turn: int, first_seed: int) -> list[dict[str, object]]:
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as name:
        tree = copy_tree(Path(name))
        job = [sys.executable, str(JOB), str(turn)]
        done = lowband("box", "run", "--cluster", "small-box", "--", *job, cwd=tree, timeout=1500)
        if done.returncode:
            sys.exit(done.stdout + done.stderr)
        told = json.loads(done.stdout.splitlines()[-1])
        found = {how: _observed(tree / RUNS / told[how]) for how in STATUS}
        spec = {how: (tree / RUNS / told[how] / "spec.json").read_text() for how in STATUS}
    rows = []
    for i, how in enumerate(STATUS):
        run, cause = told[how], told["causes"][told[how]]
        weights, losses = undisturbed(spec[how])
        status = f"SLURM status is: '{STATUS[how]}'"
        same = (found[how][0] == weights, found[how][1] == losses)
        detected_s = told["detected_s"].get(run)
        is_prompt = detected_s is not None and detected_s <= PROMPT_S
        resumed = (told["after"][run] or {}).get("resumed_from")
        wrong = [
            *([] if status in told["first_log"] else [f"not printed: {status}"]),
            *([] if told["again_code"] == 0 else ["the command given again failed"]),
            *([] if resumed else ["did not resume"]),
            *([] if all(same) else ["other results than undisturbed"]),
            *([] if is_prompt else [f"detected after {detected_s} s"]),
        ]
        rows.append({
            "seed": first_seed + i, "kind": KIND[how], "scheme": "zero3", "ranks": 2,
            "step": told["steps"][run], "victim": "", "detected_s": detected_s,
            "exit_code": told["first_code"],
            "printed": " / ".join([status, *([cause["cause"]] if cause else [])]), "printed_again": "",
            "resumed_from": resumed, "same_weights": same[0], "same_steps": same[1],
            "seconds": f"{time.monotonic() - start:.1f}", "wrong": "; ".join(wrong),
        })  # fmt: skip
    return rows


def _observed(run: Path) -> tuple[str, list[float]]:
    folder = RunFolder(run)
    outcome = folder.read_outcome()
    return ("" if outcome is None else outcome.weights_sha256), [step.loss for step in folder.whole_steps()]


@cache
def undisturbed(spec: str) -> tuple[str, list[float]]:
    """Links change no result (tests/box/test_links.py)."""
    with tempfile.TemporaryDirectory() as name:
        path = Path(name) / "spec.json"
        path.write_text(spec)
        done = lowband("train", str(path), "--links", "plain", timeout=1500)
        assert done.returncode == 0, done.stderr
        return _observed(path.parent)


if __name__ == "__main__":
    sys.exit(main())
