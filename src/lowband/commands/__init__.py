"""One file per group of sub-commands: parsing only. The implementation is imported when a command is run."""

import argparse


def at_least_one(text: str) -> int:
    """Parse a positive count. Raises the error that argparse reports in one line."""
    if text.strip().isdecimal() and int(text) >= 1:
        return int(text)
    raise argparse.ArgumentTypeError(f"'{text}' (allowed: 1 or more)")
