"""`python -m tests.mutants`: mutants of a fixed seed, one row for each.

python -m tests.mutants --out results/reference/mutants            what is in the file already is kept
python -m tests.mutants --out results/reference/mutants --again    those that survived once more
python -m tests.mutants --out FOLDER --folder engine               those of one folder; goes on where it ended

Files are copied when it starts, so the tree may be worked on meanwhile; rows then say `-dirty`. Rows of a
commit come from a clone of it.
"""

import argparse
import json
import sys
import tempfile
from multiprocessing import get_context
from pathlib import Path
from random import Random
from typing import Any

from tests import campaign_rows
from tests.checkout import ROOT
from tests.mutants.draw import SEED, Mutant, draw
from tests.mutants.trial import Found, Limits, Tree
from tests.mutants.which import COUNTS, folder_of, tests_of

COLUMNS = ("file", "line", "kind", "before", "after", "outcome", "by", "seconds", "verdict", "commit")
VERDICTS = Path(__file__).with_name("verdicts.csv")
LIMITS_S = Limits(processor=120, clock=1200)

Row = dict[str, Any]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, required=True, help="folder of mutants.csv and env.json")
    parser.add_argument("--folder", choices=list(COUNTS), nargs="*", default=list(COUNTS))
    parser.add_argument("--again", action="store_true", help="run those once more that were not killed")
    options = parser.parse_args()
    path = options.out / "mutants.csv"
    options.out.mkdir(parents=True, exist_ok=True)
    with get_context("fork").Pool(1) as pool:  # this process imports nothing that is mutated
        environment = pool.apply(_environment)
    (options.out / "env.json").write_text(json.dumps(environment, indent=2) + "\n")
    commit = environment["commit"] + ("-dirty" if environment["dirty"] else "")
    with tempfile.TemporaryDirectory() as folder:
        tree = Tree(ROOT, Path(folder))
        drawn = draw(tree.path)
        keys = {_key(mutant._asdict()) for mutant in drawn}
        rows = _kept(path, keys if options.again else set())
        named = sorted({test for mutant in drawn for test in tests_of(mutant.file)})
        if tree.run(["--collect-only", *named], LIMITS_S).outcome != "survived":
            sys.exit("tests/mutants/which.py names tests that are not there, or cannot be imported")
        # In no order of folders: a campaign that is stopped early has tried some of each.
        for mutant in Random(SEED).sample(drawn, len(drawn)):
            if _key(mutant._asdict()) in rows or folder_of(mutant.file) not in options.folder:
                continue
            source = mutant.apply((tree.path / mutant.file).read_bytes())
            found = tree.trial(mutant.file, source, tests_of(mutant.file), LIMITS_S)
            rows[_key(mutant._asdict())] = _row(mutant, found, commit)
            _write(path, drawn, rows)
            print(*found, *mutant[:5], flush=True)
        # What killed a mutant passes without one.
        killers = sorted({row["by"] for key, row in rows.items() if key in keys} - {""})
        unmutated = tree.run(killers, Limits(3600, 6 * 3600))
        if unmutated.outcome != "survived":
            sys.exit(f"without a mutant: {unmutated.outcome} {unmutated.by}")
    _write(path, drawn, rows)
    tried = [rows[key] for key in rows if key in keys]
    survived = sum(row["outcome"] == "survived" for row in tried)
    print(f"{len(tried)} of {len(drawn)} mutants, {survived} survived")
    return 0


def _key(row: Row) -> tuple[str, ...]:
    return tuple(str(row[column]) for column in COLUMNS[:5])


def _kept(path: Path, again: set[tuple[str, ...]]) -> dict[tuple[str, ...], Row]:
    """Rows of earlier runs, also of mutants that earlier sources gave: each row names its commit.

    again: mutants that are left out unless they were killed
    """
    rows = {_key(row): row for row in campaign_rows.read(path)}
    return {key: row for key, row in rows.items() if row["outcome"] == "killed" or key not in again}


def _environment() -> Row:
    import torch

    from lowband.run.environment import describe, host

    return describe((host(),), torch.device("cpu"), "gloo", {}, "").model_dump(mode="json")


def _row(mutant: Mutant, found: Found, commit: str) -> Row:
    row = {column: getattr(mutant, column) for column in COLUMNS[:5]}
    return row | {
        "outcome": found.outcome,
        "by": found.by,
        "seconds": f"{found.seconds:.1f}",
        "commit": commit,
    }


def _write(path: Path, drawn: list[Mutant], rows: dict[tuple[str, ...], Row]) -> None:
    """In the order in which they are drawn, then those of earlier sources; with what was found about those
    that survived."""
    of_place = {
        (row["file"], row["before"], row["after"]): row["verdict"] for row in campaign_rows.read(VERDICTS)
    }
    keys = [_key(mutant._asdict()) for mutant in drawn]
    ordered = [rows[key] for key in dict.fromkeys([*keys, *rows]) if key in rows]
    for row in ordered:
        place = row["file"], row["before"], row["after"]
        row["verdict"] = "" if row["outcome"] == "killed" else of_place.get(place, "")
    campaign_rows.write(path, COLUMNS, ordered)


if __name__ == "__main__":
    sys.exit(main())
