"""`make test-all` leaves no test out, and counts what its campaigns found."""

import ast
import subprocess
from pathlib import Path

import pytest

from tests.all import __main__ as everything
from tests.all.parts import APART, CAMPAIGNS, LETTERS, LONGEST, TESTS, Campaign
from tests.checkout import ROOT
from tests.junit import COMMAND, counted


def test_every_folder_of_tests_is_in_a_part() -> None:
    left = [argument.removeprefix("--ignore=") for argument in TESTS["other folders"] if "ignore" in argument]
    assert left == APART and all((ROOT / part).is_dir() for part in APART)
    assert all(TESTS[part][-1] == part for part in APART if part != LONGEST)
    assert {TESTS[part][TESTS[part].index("-m") + 1] for part in TESTS} == {
        "not waits and not timed", "waits and not timed", "timed",
    }  # fmt: skip


def test_every_file_of_the_longest_folder_is_in_one_part() -> None:
    of_parts = [file for letters in LETTERS for file in TESTS[f"{LONGEST} {letters}"] if file.endswith(".py")]
    assert of_parts == [str(file.relative_to(ROOT)) for file in sorted((ROOT / LONGEST).glob("test_*.py"))]


def test_pytest_knows_the_options_of_all_parts() -> None:
    options = [word for words in TESTS.values() for word in words if not word.startswith("tests")]
    command = [*COMMAND, "--collect-only", "--wide", *options, __file__]
    ended = subprocess.run(command, capture_output=True, text=True)
    assert ended.returncode != pytest.ExitCode.USAGE_ERROR, ended.stderr


@pytest.mark.parametrize("name", CAMPAIGNS)
def test_a_campaign_is_there(name: str) -> None:
    module = CAMPAIGNS[name].command[0].replace(".", "/")
    options = ast.dump(ast.parse((ROOT / module / "__main__.py").read_text()))
    assert all(f"'{word}'" in options for word in CAMPAIGNS[name].command[1:] if word.startswith("--"))


def test_what_a_campaign_wrote_is_counted(tmp_path: Path) -> None:
    campaign = Campaign(
        ["platform"], "it.csv", False, "wrong", "seed", "inputs"
    )  # a module that writes nothing
    (tmp_path / "it.csv").write_text("seed,inputs,wrong,commit\n4,20,,now\n5,30,another loss,now\n")
    found = everything.tried(campaign, tmp_path, "now")
    assert (found["tests"], found["failed"], found["which"]) == (50, 1, "5")
    found = everything.tried(campaign, tmp_path, "later")
    assert (found["tests"], found["failed"], found["which"]) == (0, 1, "it did not begin")


def test_a_campaign_that_died_has_failed(tmp_path: Path) -> None:
    (tmp_path / "it.csv").write_text("seed,wrong,commit\n4,,now\n")
    died = Campaign(["no_such_module"], "it.csv", False, "wrong", "seed")
    found = everything.tried(died, tmp_path, "now")
    assert (found["tests"], found["failed"], found["which"]) == (1, 1, "exit code 1")


@pytest.mark.parametrize(
    ("text", "which"),
    [
        ('@pytest.mark.timed("a try")\ndef test_a(): assert not 1\n', "test_a"),
        ("def a(): pass\n", "exit code 5"),
    ],
)
def test_a_run_that_names_no_failed_test_has_failed(tmp_path: Path, text: str, which: str) -> None:
    (tmp_path / "test_it.py").write_text(f"import pytest\n{text}")
    (tmp_path / "conftest.py").write_text("from tests.conftest import *\n")
    found = counted([str(tmp_path / "test_it.py"), "-p", "no:xdist", f"--rootdir={ROOT}"])
    assert (found["failed"], found["which"]) == (1, which)
