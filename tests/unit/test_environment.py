"""Which commit a record names, as far as git tells."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from lowband.run.environment import code_version
from tests.checkout import ROOT


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


@pytest.mark.parametrize(
    "changed", ["src/lowband/engine/transport/lane.py", "src/lowband/new.py", "config/models.yaml"]
)
def test_a_change_anywhere_in_the_package_or_in_config_counts(
    changed: str, tmp_path: Path, needs_git: None
) -> None:
    for part in ("src/lowband", "config"):
        shutil.copytree(ROOT / part, tmp_path / part, ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / ".gitignore").write_text("__pycache__\n")
    code = "from lowband.run.environment import code_version; print(code_version()[1])"
    env = {key: value for key, value in os.environ.items() if key != "LOWBAND_COMMIT"}

    def differs() -> str:
        command = [sys.executable, "-c", code]
        found = subprocess.run(
            command,
            env={**env, "PYTHONPATH": str(tmp_path / "src")},
            capture_output=True,
            text=True,
            check=True,
        )
        return found.stdout.strip()

    git = ["git", "-C", str(tmp_path), "-c", "user.name=t", "-c", "user.email=t@example.org"]
    for arguments in (["init", "-q"], ["add", "."], ["commit", "-qm", "all"]):
        subprocess.run([*git, *arguments], check=True)
    assert differs() == "False"
    with (tmp_path / changed).open("a") as file:
        file.write("\n")
    assert differs() == "True"
