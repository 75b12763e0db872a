"""The commits that shipped rows name, and the history that they should be in.

    python -m tests.named_commits

writes into commits.csv, for each file that is "added by" a commit and differs from what it was then, the one
that changed it last. Predicted tables are among these: tests make them again from today's code.
"""

import csv
import json
import shutil
import subprocess
from collections import Counter
from pathlib import Path

from tests.checkout import REFERENCE, ROOT

TABLE = "commits.csv"  # file, commit, how, why: of files that name no commit, nor does a file beside them
ADDED = "added by"  # a commit that made the file what it is
HOW = (ADDED, "made at")  # the latter where the file's history shows it
CAMPAIGN = "campaign.csv"  # which part of tests.campaign was measured where and when
ENVIRONMENTS = ("env.json", "environment.json", "softmax_env.json")
RUNS = ("runs.csv", "softmax_setup.csv")  # of the rows of other tables beside them


def rows_of(path: Path) -> list[dict[str, str]]:
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def of_file(path: Path, folder: Path = REFERENCE) -> Counter[str]:
    """Rows of a CSV file by commit, as its own column, the table or the environment beside it says.

    0 rows each where none of these says which rows are whose. A run that was not started names no commit.
    """
    rows = rows_of(path)
    if rows and "commit" in rows[0]:
        return Counter(row["commit"] for row in rows if row.get("status") != "not run")
    name = path.relative_to(folder).as_posix()
    listed = [row["commit"] for row in rows_of(folder / TABLE) if row["file"] == name]
    listed = listed or [
        json.loads(beside.read_text(encoding="utf-8"))["commit"]
        for beside in [path.parent / "env.json"]
        if beside.exists()
    ]
    if listed:
        return Counter(dict.fromkeys(listed, len(rows) if len(listed) == 1 else 0))
    runs = (path.parent / name for name in RUNS)
    return Counter({commit: 0 for file in runs if file.exists() for commit in of_file(file, folder)})


def everywhere(folder: Path = REFERENCE) -> dict[str, set[str]]:
    """The files that name each commit: tables, and environments as JSON."""
    places: dict[str, set[str]] = {}
    for path in sorted(folder.rglob("*")):
        if path.suffix == ".csv":
            commits = set(of_file(path, folder))
        elif path.name in ENVIRONMENTS:
            commits = {json.loads(path.read_text(encoding="utf-8"))["commit"]}
        else:
            continue
        for commit in commits:
            places.setdefault(commit, set()).add(path.relative_to(folder).as_posix())
    return places


def git(*arguments: str, root: Path = ROOT) -> str:
    return subprocess.run(
        ["git", "-C", str(root), *arguments], check=True, capture_output=True, text=True
    ).stdout.strip()


def changes(file: str) -> list[str]:
    """The commits that changed a file of results/reference, the last one first."""
    return git("log", "--format=%H", "--", str(REFERENCE / file)).split()


def is_as_added(commit: str, file: str) -> bool:
    """Whether the commit changed a file of results/reference to what it is in HEAD."""
    return commit in changes(file) and not git(
        "diff", "--name-only", commit, "HEAD", "--", str(REFERENCE / file)
    )


def no_history(root: Path = ROOT) -> str:
    """Why the commits of `root` cannot be looked up here; empty where they can."""
    if shutil.which("git") is None:
        return "needs git"
    try:
        top = git("rev-parse", "--show-toplevel", root=root)
    except subprocess.CalledProcessError:
        return "no git work tree, or none that git reads: a copy without its history"
    if Path(top).resolve() != root.resolve():
        return "no git work tree of its own: a copy inside another one"
    if git("rev-parse", "--is-shallow-repository", root=root) == "true":
        return "a shallow clone: git fetch --unshallow"
    return ""


def ancestors(commit: str = "HEAD", root: Path = ROOT) -> frozenset[str]:
    """The commit and all that came before it: those for which `git merge-base --is-ancestor` says yes."""
    return frozenset(git("rev-list", commit, root=root).split())


def found_in(history: frozenset[str], commit: str) -> str | None:
    """The whole name of a commit of the history, by it or by its first digits."""
    named = commit.removesuffix("-dirty")
    if named in history:
        return named
    matching = [whole for whole in history if len(named) >= 7 and whole.startswith(named)]
    return matching[0] if len(matching) == 1 else None


def renew() -> None:
    rows = rows_of(REFERENCE / TABLE)
    for row in rows:
        if row["how"] == ADDED and not is_as_added(row["commit"], row["file"]):
            row["commit"] = changes(row["file"])[0]
    with (REFERENCE / TABLE).open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, fieldnames=list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


if __name__ == "__main__":
    renew()
