"""The hashed versions, and the container that installs them, checked as far as is possible without one."""

import re
import subprocess
import tomllib

import pytest

from tests.checkout import ROOT

ENVS = ROOT / "envs"
SECTIONS = {  # of a definition file, in Apptainer's user guide
    "arguments", "setup", "files", "post", "test", "environment", "startscript", "runscript", "labels",
    "help",
}  # fmt: skip


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def pinned(text: str) -> dict[str, str]:
    """Versions by name, of lines `name==version`."""
    return {
        normal(name): version for name, version in re.findall(r"^([\w.-]+)==([^\s;\\]+)", text, re.MULTILINE)
    }


LOCK = (ENVS / "lock.txt").read_text()
LOCKED = pinned(LOCK)


def test_locked_versions_are_the_proven_ones_each_with_a_hash() -> None:
    constraints = pinned((ENVS / "constraints.txt").read_text())
    assert LOCKED.items() <= constraints.items()
    requirements = re.split(
        r"^(?=[a-z])", re.sub(r"^ *#.*\n", "", LOCK, flags=re.MULTILINE), flags=re.MULTILINE
    )
    for requirement in filter(None, requirements):
        assert re.fullmatch(r"[\w.-]+==\S+ \\\n( +--hash=sha256:[0-9a-f]{64}( \\)?\n)+", requirement), (
            requirement
        )
    assert "://" not in LOCK


def test_all_that_a_site_needs_but_torch_is_locked() -> None:
    project = tomllib.loads((ENVS.parent / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    asked = [*project["dependencies"], *extras["train"], *extras["report"], *extras["workflow"]]
    names = {normal(re.split(r"[<>=]", line)[0]) for line in asked}
    assert names - LOCKED.keys() == {"torch"}
    assert not [name for name in LOCKED if "torch" in name or name.startswith("nvidia")]


def sections() -> tuple[dict[str, str], dict[str, str]]:
    """The definition's header and its sections."""
    head, *parts = re.split(r"^%(?=\w)", (ENVS / "lowband.def").read_text(), flags=re.MULTILINE)
    lines = [line for line in head.splitlines() if line and not line.startswith("#")]
    named = dict(part.split("\n", 1) for part in parts)
    assert len(named) == len(parts)
    return dict(line.split(": ") for line in lines), named


def test_the_definition_has_only_sections_and_arguments_that_exist() -> None:
    header, parts = sections()
    assert header.keys() == {"Bootstrap", "From"}
    assert parts.keys() <= SECTIONS
    declared = dict(line.strip().split("=") for line in parts["arguments"].splitlines() if line.strip())
    used = set(re.findall(r"\{\{ (\w+) \}\}", (ENVS / "lowband.def").read_text()))
    assert used == declared.keys()
    assert declared["torch"] == pinned((ENVS / "constraints.txt").read_text())["torch"]
    for line in filter(None, map(str.strip, parts["files"].splitlines())):
        assert (ENVS.parent / line.split()[0]).is_file()


@pytest.mark.parametrize("name", ["post", "test", "environment", "runscript"])
def test_a_script_of_the_definition_parses(name: str) -> None:
    script = sections()[1][name]
    assert subprocess.run(["sh", "-n"], input=script, text=True).returncode == 0


def test_what_the_containers_test_imports_is_installed() -> None:
    imported = re.search(r"import ([\w, ]+);", sections()[1]["test"])
    assert imported is not None
    names = {"pyyaml" if name == "yaml" else name for name in imported[1].split(", ")}
    assert names - LOCKED.keys() == {"torch"}
