"""One file per group of sub-commands: parsing only. What they do is imported when one is run."""

import argparse


def at_least_one(text: str) -> int:
    """An argument that counts something. Raises what argparse tells in one line."""
    if text.strip().isdecimal() and int(text) >= 1:
        return int(text)
    raise argparse.ArgumentTypeError(f"'{text}' (allowed: 1 or more)")
