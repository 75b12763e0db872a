"""schedules: pipelines predicted."""

import argparse
from typing import Any

from lowband.commands import add_verb, at_least_one, positive


def add(commands: Any) -> None:
    schedules = add_verb(
        commands, _schedules, "schedules", "bubbles of pipelines' schedules at equal memory, as CSV",
        "--ranks 4 8 --micro-batches 8 32 --send 0.1 0.5",
        "Times are in forwards of one micro-batch in all of a rank's stages. Beside named schedules is the "
        "best list that a search for such sends finds (lowband.lists_for_sends). Empty: more memory than "
        "allowed. Options that take several values make a grid.",
    )  # fmt: skip
    schedules.add_argument("--ranks", nargs="+", type=at_least_one, required=True, help="along the pipeline")
    schedules.add_argument("--micro-batches", nargs="+", type=at_least_one, required=True, help="of a step")
    schedules.add_argument("--send", nargs="+", type=positive, required=True, help="to the next rank")
    schedules.add_argument("--input", type=positive, default=1.0, help="a backward's input part (default: 1)")
    schedules.add_argument("--weight", type=positive, default=1.0, help="and its weight part (default: 1)")
    schedules.add_argument(
        "--memory", type=positive, help="the most micro-batches on a rank (default: as many as ranks)"
    )


def _schedules(options: argparse.Namespace) -> None:
    import sys
    from itertools import product

    import pandas as pd

    from lowband.cost.player import Seconds
    from lowband.cost.slow_sends import compared

    rows = [
        {"provenance": "predicted"}
        | compared(ranks, many, Seconds(1.0, options.input, options.weight, send), options.memory)
        for ranks, many, send in product(options.ranks, options.micro_batches, options.send)
    ]
    pd.DataFrame(rows).to_csv(sys.stdout, index=False, float_format="%.6g", lineterminator="\n")
