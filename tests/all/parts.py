"""What `make test-all` runs, part by part; every test is in one of the first five."""

from typing import NamedTuple

_BESIDE = ["--dist", "loadfile", "--no-loadscope-reorder"]
_COMPUTE = ["-n", "2", *_BESIDE, "-m", "not waits and not timed"]

# part: arguments of pytest
TESTS = {
    "tests/unit": [*_COMPUTE, "tests/unit"],
    "tests/dist": [*_COMPUTE, "tests/dist"],
    "other folders": [*_COMPUTE, "tests", "--ignore=tests/unit", "--ignore=tests/dist"],
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
