"""What `make test-all` runs, part by part; every test is in one of `TESTS`."""

from typing import NamedTuple

from tests.checkout import ROOT

_BESIDE = ["--dist", "loadfile", "--no-loadscope-reorder"]
_COMPUTE = ["-n", "2", *_BESIDE, "-m", "not waits and not timed"]

# Folders that take longest are parts of their own, so that a cut costs one of them; the longest, which takes
# hours, by the first letters of its files.
APART = ["tests/unit", "tests/dist", "tests/workflow", "tests/kernels", "tests/random", "tests/wide"]
LONGEST, LETTERS = "tests/dist", ["a-b", "c", "d-g", "h-m", "n-p", "q-s", "t-z"]

# part: arguments of pytest
TESTS = {
    **{folder: [*_COMPUTE, folder] for folder in APART if folder != LONGEST},
    **{
        f"{LONGEST} {letters}": [
            *_COMPUTE,
            *(f"{LONGEST}/{file.name}" for file in sorted((ROOT / LONGEST).glob(f"test_[{letters}]*.py"))),
        ]
        for letters in LETTERS
    },
    "other folders": [*_COMPUTE, "tests", *(f"--ignore={folder}" for folder in APART)],
    "waits": ["-n", "2", *_BESIDE, "-m", "waits and not timed", "tests"],
    "timed": ["-n", "3", *_BESIDE, "-m", "timed", "tests"],
}


class Campaign(NamedTuple):
    """A module that writes a row for each case.

    file: what it writes, in the folder of the parts; takes_folder: `--out` is that file's folder
    wrong, name: columns: not "" or "0" where a case is wrong; what names a case
    counts: column of how many cases a row counts; "": one
    """

    command: list[str]
    file: str
    takes_folder: bool
    wrong: str
    name: str
    counts: str = ""


CAMPAIGNS = {
    "random": Campaign(["tests.random", "--cases", "1000"], "random.csv", False, "wrong", "seed"),
    "wide": Campaign(["tests.wide", "--cases", "300"], "wide.csv", False, "wrong", "seed"),
    "fuzz": Campaign(["tests.fuzz", "--inputs", "600"], "fuzz.csv", False, "defects", "parser", "inputs"),
    "faults": Campaign(["tests.faults", "--cases", "200"], "faults/injected.csv", True, "wrong", "seed"),
}
