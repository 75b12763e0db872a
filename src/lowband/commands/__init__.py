"""One file per group of verbs: parsing only. The implementation is imported when a verb is run."""

import argparse
import math
import re
import textwrap
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any, NoReturn

from lowband.errors import UserError

MOST_COUNT = 10**12  # of a count on the command line
LONGEST_NAME = 100  # characters of a name on the command line, to which endings are added


class Parser(argparse.ArgumentParser):
    """A parser whose errors are one line of bounded length, without the usage that argparse prints first."""

    def error(self, message: str) -> NoReturn:
        raise UserError(message, where=self.prog.removeprefix("lowband").strip())


def add_verb(
    commands: Any, run: Callable[[argparse.Namespace], int | None], name: str, summary: str, example: str,
    details: str = "",
) -> argparse.ArgumentParser:  # fmt: skip
    """Add a verb to the command line.

    run: takes the options, and returns the exit code if it is not 0
    summary: its line in `lowband --help`, at most 63 characters
    example: its arguments in a call that its own help shows
    details: what its own help says besides
    """
    description = "\n\n".join(filter(None, [summary, textwrap.fill(details, 80)]))
    parser: argparse.ArgumentParser = commands.add_parser(
        name, description=description, epilog=f"example:\n  lowband {name} {example}".rstrip(),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.set_defaults(run=run)
    return parser


def at_least_one(text: str) -> int:
    """Parse a positive count. Raises the error that argparse reports in one line."""
    if text.strip().isdecimal() and len(text) <= len(str(MOST_COUNT)) and 1 <= int(text) <= MOST_COUNT:
        return int(text)
    raise argparse.ArgumentTypeError(f"'{text}' (allowed: 1 or more, at most {MOST_COUNT:,})")


def at_least_zero(text: str) -> int:
    """An argument's type: a number of things of which there may be none."""
    return 0 if text.strip() == "0" else at_least_one(text)


def positive(text: str) -> float:
    """Parse a number of the size of a rate. Raises the error that argparse reports in one line."""
    from lowband.spec.sourced import LEAST, MOST  # needs pydantic, which `bench-kernel` does without

    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not LEAST <= value <= MOST:
        raise argparse.ArgumentTypeError(f"'{text}' (allowed: a number above 0, {LEAST:g} to {MOST:g})")
    return value


def name(text: str) -> str:
    """An argument's type: the name of a folder or file that is made in a place of its own."""
    if len(text) > LONGEST_NAME or not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", text):
        raise argparse.ArgumentTypeError(f"'{text}' (allowed: a name of letters, digits, '.', '_' and '-')")
    return text


def root(text: str) -> Path:
    """An argument's type: a folder that is there. Without it every name would be looked up as built in."""
    path = Path(text)
    if not path.is_dir():
        raise argparse.ArgumentTypeError(f"'{text}' (allowed: a folder that is there)")
    return path


def write_environment(out: Path, device: str = "cpu", source: str = "none", links: str = "loopback") -> None:
    """Write env.json, of what was measured here beside runs. source: of the data"""
    import torch

    from lowband.run.environment import describe, host
    from lowband.spec.files import write_whole

    backend = "nccl" if device == "cuda" else "gloo"
    environment = describe((host(),), torch.device(device), backend, {"source": source}, links)
    write_whole(out / "env.json", environment.to_json())


def function_of(name: str) -> Any:
    """name: "module:function" of the package"""
    module, _, function = name.partition(":")
    return getattr(import_module(f"lowband.{module}"), function)


def calls(name: str, *given: str) -> Callable[[argparse.Namespace], int | None]:
    """What runs a verb that is a call of one function with these options. name: as of `function_of`"""

    def run(options: argparse.Namespace) -> None:
        function_of(name)(*(getattr(options, option) for option in given))

    return run
