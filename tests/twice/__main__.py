"""`python -m tests.twice --out FOLDER`: same spec, same machine, same bits, twice.

Each run is made twice in new processes, with another hash seed: final weights, the loss and the gradient
norm of each step are compared bit by bit, also with the case that it is `like`. Then commands of the
predictor and of the workflow: all that they print and write. Rows that the folder has already are kept.
"""

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from lowband.spec.run_folder import RunFolder
from tests.campaign_rows import Rows, write_environment
from tests.checkout import ROOT
from tests.twice.cases import CASES, COMMANDS, LINKED, LONGEST_S
from tests.twice.runs import run_folder

COLUMNS = ("what", "against", "is_promised", "same", "first_difference", "why", "commit")
ITSELF = "itself"
ATTEMPTS = ("1", "2")  # also the hash seeds


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.twice", description=__doc__.split("\n")[0])
    parser.add_argument("--only", nargs="*", default=[], help="cases or commands, by name; default: all")
    parser.add_argument("--work", type=Path, help="folder to keep the runs in")
    parser.add_argument("--out", type=Path, required=True, help="folder of twice.csv, env.json")
    options = parser.parse_args()
    write_environment(options.out)
    rows = Rows(options.out / "twice.csv", COLUMNS, ("what", "against"))
    with tempfile.TemporaryDirectory() as temporary:
        work = options.work or Path(temporary)
        _train_twice(work, options.only)
        for name, against, promised, why, compare in _comparisons(work):
            if rows.has(name, against) or (options.only and name not in options.only):
                continue
            difference = compare()
            row = {
                "what": name, "against": against, "is_promised": promised, "same": not difference,
                "first_difference": difference, "why": why if difference else "",
            }  # fmt: skip
            print(*rows.add(row).values(), sep=" | ", flush=True)
    return int(any(str(row["is_promised"]) == "True" != str(row["same"]) for row in rows))


def _train_twice(work: Path, names: list[str]) -> None:
    """Into `work`/1 and `work`/2, by two processes at once."""
    cases = [case.name for case in CASES if case.name in names]
    if names and not cases:
        return
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.twice.runs", work / attempt, *cases], cwd=ROOT, env=_env(attempt),
            stdout=subprocess.DEVNULL,
        )
        for attempt in ATTEMPTS
    ]  # fmt: skip
    codes = [process.wait() for process in processes]
    if any(codes):
        sys.exit(1)


def _comparisons(work: Path):
    first, second = (work / attempt for attempt in ATTEMPTS)
    for case in CASES:
        yield (
            case.name, ITSELF, True, "",
            lambda case=case: differing(run_folder(first, case), run_folder(second, case)),
        )  # fmt: skip
    for case in CASES:
        if case.like:
            [other] = [each for each in CASES if each.name == case.like]
            yield (
                case.name, case.like, case.is_promised, case.why,
                lambda case=case, other=other: differing(run_folder(first, case), run_folder(first, other)),
            )  # fmt: skip
    for name, command in COMMANDS.items():
        yield name, ITSELF, True, "", lambda command=command: _files_differ(command, first)


def differing(one: RunFolder, other: RunFolder) -> str:
    """The first difference between two runs; empty if their results have the same bits."""
    for mine, theirs in zip(one.whole_steps(), other.whole_steps(), strict=True):
        for name in ("loss", "grad_norm"):
            if getattr(mine, name) != getattr(theirs, name):
                return f"step {mine.step}: {name}"
    sums = [folder.read_outcome().weights_sha256 for folder in (one, other)]
    assert all(sums)
    return "" if sums[0] == sums[1] else "final weights"


def _files_differ(command: tuple[str, ...], work: Path) -> str:
    """The first file that a command does not write with the same bits twice, or what it prints.

    work: folder of run folders
    """
    one, other = (contents(command, work, attempt) for attempt in ATTEMPTS)
    assert list(one) == list(other)
    return next((name for name in one if one[name] != other[name]), "")


def contents(command: tuple[str, ...], work: Path, attempt: str) -> dict[str, bytes]:
    """What a command prints, and each file that it writes, run in a new folder."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for part in LINKED:
            (folder / part).symlink_to(ROOT / part)
        runs = sorted(str(path.parent) for path in work.glob("*/outcome.json"))
        (folder / "runs.txt").write_text("".join(f"{run}\n" for run in runs))
        printed = _call(list(command), folder, attempt)
        files = sorted(path for path in folder.glob("out/**/*") if path.is_file())
        assert printed or files
        return {
            "what it prints": printed,
            **{str(path.relative_to(folder)): path.read_bytes() for path in files},
        }


def _env(attempt: str) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}", "PYTHONHASHSEED": attempt}


def _call(command: list[str], folder: Path, attempt: str) -> bytes:
    """What it prints. Ends the campaign if it fails."""
    result = subprocess.run(
        [sys.executable, "-m", *command],
        cwd=folder,
        env=_env(attempt),
        capture_output=True,
        timeout=LONGEST_S,
    )
    if result.returncode:
        sys.exit(f"{' '.join(command)}: {result.stderr.decode()}")
    return result.stdout


if __name__ == "__main__":
    sys.exit(main())
