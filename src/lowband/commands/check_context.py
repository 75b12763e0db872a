"""check-context: a module over ranks along context, compared with one process."""

import argparse
import math
from pathlib import Path
from typing import Any

from lowband.commands import add_verb, at_least_one


def add(commands: Any) -> None:
    check = add_verb(
        commands, _check, "check-context", "whether a module is right with its tokens on several ranks",
        "attention.py --ranks 4",
        "The file defines make(context), which returns the module, and inputs(), a batch [B, T, ...]. The "
        "module attends with context.attention or context.linear_attention, or as on one process where "
        "context is None. Outputs and gradients of both are compared in fp64 on this machine's processor, in "
        "every way that ranks can attend to each other's tokens. Exit code 1 if one differs.",
    )  # fmt: skip
    check.add_argument("file", type=Path, help="a Python file")
    check.add_argument("--ranks", type=at_least_one, default=4, help="along context (default: 4)")
    check.add_argument(
        "--tolerance", type=_share, default=1e-9,
        help="the largest relative difference (default: 1e-9; a module that rounds to 32 bits: 1e-5)",
    )  # fmt: skip


def _share(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < 1:
        raise argparse.ArgumentTypeError(f"'{text}' (allowed: a number between 0 and 1)")
    return value


def _check(options: argparse.Namespace) -> int:
    from lowband.run.check_context import check_context

    found = check_context(options.file, options.ranks)
    width = max(len(one.way.name) for one in found)
    print(f"{'attention':{width}}  outputs  gradients")
    wrong = 0
    for one in found:
        if one.refused:
            print(f"{one.way.name:{width}}  refused: {one.refused}")
            continue
        line = f"{one.way.name:{width}}  {one.outputs:7.0e}  {one.gradients:9.0e}"
        if max(one.outputs, one.gradients) > options.tolerance:
            wrong += 1
            line += f"  {_wrong(one, options.tolerance)}"
        print(line)
    ran = sum(not one.refused for one in found)
    print(f"{ran - wrong} of {ran} ways give what one process gives, on {options.ranks} ranks")
    return int(wrong > 0 or not ran)


def _wrong(one: Any, tolerance: float) -> str:
    if one.outputs > tolerance:
        return f"wrong outputs: most of token {one.token}"
    return f"wrong gradients: most of {one.what}, where {one.of} count"
