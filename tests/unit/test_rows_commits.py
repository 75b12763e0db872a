"""The commit that a shipped row names is one that a clone has."""

import re
from pathlib import Path

import pytest

from tests.age import MEASURED, measured_part, share
from tests.checkout import ROOT
from tests.named_commits import (
    ADDED,
    CAMPAIGN,
    HOW,
    REFERENCE,
    RUNS,
    TABLE,
    ancestors,
    everywhere,
    found_in,
    git,
    is_as_added,
    no_history,
    of_file,
    rows_of,
)

CSV = sorted(REFERENCE.rglob("*.csv"))


@pytest.fixture(scope="module")
def history() -> frozenset[str]:
    reason = no_history()
    if reason:
        pytest.skip(reason)
    return ancestors()


def test_every_commit_that_rows_name_is_in_this_history(history: frozenset[str]) -> None:
    lost = {commit: files for commit, files in everywhere().items() if found_in(history, commit) is None}
    assert not lost, "measure on a commit that has landed, or merge without rebasing"


def test_what_is_in_the_history_is_an_ancestor(history: frozenset[str]) -> None:
    oldest = git("rev-list", "--max-parents=0", "HEAD").split()[0]
    assert git("merge-base", "--is-ancestor", oldest, "HEAD") == ""
    assert found_in(history, oldest) == found_in(history, oldest[:12]) == oldest
    assert found_in(history, oldest[:4]) is None
    assert found_in(history, "0" * 40) is None


def test_every_table_names_its_commits() -> None:
    for path in CSV:
        commits = of_file(path)
        assert commits, f"{path.relative_to(REFERENCE)}: a column commit, an env.json, or a row in {TABLE}"
        for commit in commits:
            assert re.fullmatch(r"[0-9a-f]{40}(-dirty)?", commit), (
                f"{path.relative_to(REFERENCE)}: {commit!r}"
            )


def test_the_table_of_commits_is_about_files_that_name_none(history: frozenset[str]) -> None:
    for row in rows_of(REFERENCE / TABLE):
        path = REFERENCE / row["file"]
        assert path.is_file(), row["file"]
        assert path.suffix != ".csv" or "commit" not in rows_of(path)[0], f"{row['file']} has a column"
        assert row["how"] in HOW
        if row["how"] == ADDED:
            assert is_as_added(row["commit"], row["file"]), f"{row['file']}: python -m tests.named_commits"


def test_a_table_beside_runs_is_of_their_commits(tmp_path: Path) -> None:
    (tmp_path / TABLE).write_text("file,commit,how,why\na/x.csv,%s,made at,\n" % ("1" * 40))
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / RUNS[0]).write_text("status,commit\nok,%s\nnot run,\n" % ("2" * 40))
    for name in ("x", "y"):
        (tmp_path / "a" / f"{name}.csv").write_text("value\n1\n")
    assert of_file(tmp_path / "a" / "x.csv", tmp_path) == {"1" * 40: 1}
    assert of_file(tmp_path / "a" / "y.csv", tmp_path) == {"2" * 40: 0}
    (tmp_path / "b.csv").write_text("value\n1\n")
    assert not of_file(tmp_path / "b.csv", tmp_path)


def test_where_nothing_can_be_looked_up_the_reason_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if no_history() == "needs git":
        pytest.skip("needs git")
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path))
    copy, origin, shallow = (tmp_path / name for name in ("copy", "origin", "shallow"))
    copy.mkdir()
    assert no_history(copy).startswith("no git work tree, or none")
    git("init", "--quiet", str(origin), root=tmp_path)
    for message in ("one", "two"):
        git("-c", "user.name=a", "-c", "user.email=a@b", "commit", "--quiet", "--allow-empty", "-m", message,
            root=origin)  # fmt: skip
    assert no_history(origin) == ""
    (origin / "inside").mkdir()
    assert no_history(origin / "inside").startswith("no git work tree of its own")
    git("clone", "--quiet", "--depth", "1", f"file://{origin}", str(shallow), root=tmp_path)
    assert no_history(shallow).startswith("a shallow clone")
    monkeypatch.setenv("PATH", str(copy))
    assert no_history(origin) == "needs git"


def test_every_table_has_a_measured_part() -> None:
    for path in CSV:
        assert measured_part(path.relative_to(REFERENCE).as_posix())
    names = [path.relative_to(REFERENCE).as_posix() for path in CSV]
    assert measured_part(CAMPAIGN) == measured_part(TABLE)
    assert all(any(name.startswith(prefix) for name in names) for prefix in MEASURED)
    assert all((ROOT / part).exists() for parts in MEASURED.values() for part in parts)


def test_a_part_is_as_old_as_its_lines(history: frozenset[str]) -> None:
    part = ("src/lowband/engine/jobs/quorum.py",)
    assert share(part, git("rev-parse", "HEAD")) == 1
    assert share(part, git("rev-list", "--max-parents=0", "HEAD").split()[0]) == 0
