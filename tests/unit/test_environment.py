"""Which commit a record names, as far as git tells."""

from pathlib import Path

import pytest

from lowband.run.environment import code_version


@pytest.mark.parametrize(
    ("rev_parse", "status", "expected"),
    [
        ("echo abc", "true", ("abc", False)),
        ("echo abc", "echo ' M run.py'", ("abc", True)),
        ("echo abc", "exit 1", ("abc", True)),  # nothing vouches for the files; the commit is still known
        ("exit 128", "exit 128", ("unknown", False)),
    ],
)
def test_commit_and_whether_files_differ(
    rev_parse: str, status: str, expected: tuple[str, bool], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    git = tmp_path / "git"
    git.write_text(f'#!/bin/sh\ncase "$*" in *rev-parse*) {rev_parse};; *) {status};; esac\n')
    git.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.delenv("LOWBAND_COMMIT", raising=False)
    assert code_version.__wrapped__() == expected
    monkeypatch.setenv("LOWBAND_COMMIT", "copied")  # of a copy of the tree, whatever its own git is of
    assert code_version.__wrapped__() == ("copied", False)
