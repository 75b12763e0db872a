"""`python -m tests.fuzz`: changed files for every parser, from fixed seeds or led by coverage; a row each.

python -m tests.fuzz --inputs 1000 --out FILE
python -m tests.fuzz --guided --inputs 10000 --out results/reference/fuzz/inputs.csv
python -m tests.fuzz --target suite --seed 17

An input is sound if it is accepted, refused by one line that names the file, or, for a line of a foreign log,
reported with its number. Anything else is a defect: a traceback, a message of several lines, of more than
5,000 characters or without its file, more than ten seconds of the processor, more than 1 GiB beyond what the
process had.
"""

import argparse
import contextlib
import sys
from pathlib import Path
from typing import Any


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__.split("\n")[0])
    parser.add_argument("--inputs", type=int, default=1000, help="for each parser (default: 1000)")
    parser.add_argument("--first", type=int, default=0, help="the first seed (default: 0)")
    parser.add_argument("--target", nargs="+", help="these parsers only")
    parser.add_argument("--group", nargs="+", help="these groups of parsers only")
    parser.add_argument("--seed", type=int, help="print the input of one seed and what happens")
    parser.add_argument("--guided", action="store_true", help="by coverage: needs atheris")
    parser.add_argument(
        "--seconds", type=float, default=600, help="of the processor, for each parser, with --guided"
    )
    parser.add_argument(
        "--out", type=Path, help="CSV, one row a parser; rows of other parsers in it are kept"
    )
    parser.add_argument("--defects", type=Path, help="folder that receives an input of each distinct defect")
    options = parser.parse_args()
    with _instrumented() if options.guided else contextlib.nullcontext():
        from tests.fuzz.campaign import run  # after atheris: it instruments what is imported from now on

        return run(options)


def _instrumented() -> Any:
    import atheris

    return atheris.instrument_imports(include=["lowband"])


if __name__ == "__main__":
    sys.exit(main())
