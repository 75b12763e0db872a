"""One file per group of verbs: parsing only. The implementation is imported when a verb is run."""

import argparse
import math
import textwrap
from typing import Any


def add_verb(
    commands: Any, name: str, summary: str, example: str, details: str = ""
) -> argparse.ArgumentParser:
    """Add a verb to the command line.

    summary: its line in `lowband --help`, at most 63 characters
    example: its arguments in a call that its own help shows
    details: what its own help says besides
    """
    description = "\n\n".join(filter(None, [summary, textwrap.fill(details, 80)]))
    parser: argparse.ArgumentParser = commands.add_parser(
        name, description=description, epilog=f"example:\n  lowband {name} {example}".rstrip(),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    return parser


def at_least_one(text: str) -> int:
    """Parse a positive count. Raises the error that argparse reports in one line."""
    if text.strip().isdecimal() and int(text) >= 1:
        return int(text)
    raise argparse.ArgumentTypeError(f"'{text}' (allowed: 1 or more)")


def positive(text: str) -> float:
    """Parse a finite number above 0. Raises the error that argparse reports in one line."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"'{text}' (allowed: a number above 0)")
    return value
