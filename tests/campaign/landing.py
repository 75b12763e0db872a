"""What a part measured -> results/reference: rows replaced, sums renewed, one commit of these files alone."""

import shutil
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from lowband.errors import UserError
from lowband.evidence.report.verify import SUMS, write_sums
from lowband.evidence.tables.build import write_table
from lowband.evidence.tables.entries import COLLECTED, TABLES
from lowband.evidence.tables.points import COLUMNS as OPTIONS
from lowband.spec.axes import shown
from lowband.spec.run import RunSpec
from tests import named_commits
from tests.campaign.measuring import Measurement
from tests.campaign_rows import Row, read, write
from tests.named_commits import ancestors, git

IN_TREE = Path("results/reference")  # of any checkout
CAMPAIGN = IN_TREE / named_commits.CAMPAIGN
COLUMNS = ("part", "commit", "begun", "seconds", "load_before", "processor", "boot_id", "host")


def check(root: Path, commit: str) -> None:
    """Raises UserError if nothing can be put here: of another history, or files are not as committed."""
    if commit not in ancestors(root=root):
        raise UserError(
            "is no ancestor of HEAD", where=f"--commit {commit}", allowed="a commit that has landed"
        )
    if changed := git("status", "--porcelain", "--", "results", root=root):
        raise UserError("changed, or new", where=changed.split()[1], allowed="commit or restore it first")


def replaced(
    old: Sequence[Row],
    new: Sequence[Row],
    is_mine: Callable[[Mapping[str, str]], bool],
    left_out: Sequence[str],
    where: Path,
) -> tuple[list[str], list[Row]]:
    """Columns and rows of a shipped table whose rows that are mine the new ones replace, in their place.

    The others stay as they are, and so do their columns: a new option is left out where it has its default,
    as they had (`same_but`). Raises UserError if columns do not agree.
    """
    kept = [row for row in old if not is_mine(row)]
    at = next((i for i, row in enumerate(old) if is_mine(row)), len(old))
    columns = [name for name in (new or old)[0] if name not in left_out]
    if lost := set(old[0]) - set(columns):
        raise UserError("columns that the new rows lack", where=where, allowed=lost)
    if kept:
        added = [
            name for name in columns if name not in old[0] and any(row[name] != _default(name) for row in new)
        ]
        if added:
            allowed = "those of the other rows: workflow/scripts/add_points.py adds options"
            raise UserError(f"new columns: {', '.join(added)}", where=where, allowed=allowed)
        columns = list(old[0])
    rows = [*old[:at], *new, *(row for row in old[at:] if not is_mine(row))]
    return columns, [{name: row[name] for name in columns} for row in rows]


def _default(column: str) -> str:
    """As runs.csv has it; empty for a result."""
    option = next((option for option, name in OPTIONS.items() if name == column), "")
    value = shown(RunSpec.model_fields[option].default) if option else None
    return "" if value is None else str(value)


def tables(root: Path, made: Measurement) -> dict[Path, tuple[list[str], list[Row]]]:
    """The part's shipped tables with its new rows. Raises UserError if they do not fit."""
    part, folder = made.part, root / IN_TREE / made.part.folder
    if part.steps:
        files = dict.fromkeys(step.file for step in part.steps)
        new = {part.table: [row for file in files for row in read(made.out / file)]}
    else:
        collected = made.out / "tables"
        runs = map(str, sorted((made.out / "runs").iterdir()))
        made.do("lowband", "collect", *runs, "--out", str(collected))
        new = {f"{name}.csv": read(collected / f"{name}.csv") for name in COLLECTED}
    found = {}
    for name, rows in new.items():
        if old := read(folder / name):
            left_out = part.left_out if name == "steps.csv" else ()
            found[folder / name] = replaced(old, rows, part.has, left_out, folder / name)
    return found


def put(root: Path, commit: str, made: Measurement) -> str:
    """Commit the part's rows. Returns the line that says so. Raises UserError, with nothing changed."""
    check(root, commit)
    new = tables(root, made)
    state, part = made.state(), made.part
    mine = [row for columns, rows in new.values() if "commit" in columns for row in rows if part.has(row)]
    named = {row["commit"] + ("-dirty" if row.get("dirty") == "True" else "") for row in mine}
    if strange := named - {commit, ""}:
        raise UserError(f"rows of {min(strange)}", where=made.out, allowed=f"of {commit}")
    sessions: list[Mapping[str, str]] = state["sessions"]
    of_sessions = {name: " / ".join(dict.fromkeys(each[name] for each in sessions)) for name in COLUMNS[4:]}
    row = {"part": made.name, "commit": commit, "begun": sessions[0]["begun"], **of_sessions}
    row["seconds"] = f"{state['seconds']:.0f}"
    wrong = sum(map(part.is_wrong, mine))
    line = (
        f"Measured again, {made.name} at {commit[:7]}: {len(mine)} rows, {wrong} of them wrong, "
        f"in {state['seconds'] / 3600:.2f} h on {row['processor']}, load {row['load_before']} before"
    )
    files = [*new, root / CAMPAIGN, root / IN_TREE / SUMS]
    with _whole(root):
        for file, (columns, rows) in new.items():
            write(file, columns, rows)
        folder = root / IN_TREE / part.folder
        for file in sorted(folder.glob("*")):
            if file.name == "env.json" and (made.out / file.name).exists():
                shutil.copyfile(made.out / file.name, file)
                files.append(file)
            if part.suites and file.suffix == ".csv" and is_made_of_runs(file.stem):
                write_table(file.stem, folder, root=root)
                files.append(file)
        others = [each for each in read(root / CAMPAIGN) if each["part"] != made.name]
        write(root / CAMPAIGN, COLUMNS, [*others, row])
        write_sums(root)
        names = [str(file.relative_to(root)) for file in files]
        git("add", "--", *names, root=root)
        git("commit", "--quiet", "-m", line, "--", *names, root=root)
    return line


def is_made_of_runs(name: str) -> bool:
    """Whether it is a table that is derived from those that `lowband collect` writes."""
    return name in TABLES and bool({*TABLES[name].sources} & {*COLLECTED})


@contextmanager
def _whole(root: Path) -> Iterator[None]:
    """Inside, an order to end waits. What raises leaves the shipped files as they were committed."""
    orders = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP}
    signal.pthread_sigmask(signal.SIG_BLOCK, orders)
    try:
        yield
    except BaseException:
        git("reset", "--quiet", "--", "results", root=root)
        git("checkout", "--quiet", "--", "results", root=root)
        git("clean", "--quiet", "-f", "--", "results/reference", root=root)
        raise
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, orders)
