"""`python -m tests.twice.runs FOLDER [CASE ...]`: train cases, each forked from this process."""

import sys
from collections.abc import Collection
from pathlib import Path

from lowband.spec.run_folder import RunFolder
from tests.dist.started import begun, killed, stderr_of
from tests.twice.cases import CASES, LONGEST_S, Case


def run_folder(folder: Path, case: Case) -> RunFolder:
    return RunFolder(folder / case.run_id)


def train_cases(folder: Path, names: Collection[str] = ()) -> None:
    """Train the cases of these names (none: all) that were not yet trained. Ends if one fails."""
    for case in CASES:
        run = run_folder(folder, case)
        ended = run.read_outcome()
        if (names and case.name not in names) or (ended is not None and ended.status == "ok"):
            continue
        run.path.mkdir(parents=True, exist_ok=True)
        run.spec.write_text(case.spec().to_json())
        process = begun(run.spec)
        process.join(LONGEST_S)
        killed(process)
        if process.exitcode:
            sys.exit(f"{case.name}: {stderr_of(run.spec).read_text()}")


if __name__ == "__main__":
    train_cases(Path(sys.argv[1]), sys.argv[2:])
