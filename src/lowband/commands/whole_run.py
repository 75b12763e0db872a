"""A whole run of --tokens: its days, GPU-hours and energy, below what a verb says of a step."""

import argparse
from collections.abc import Sequence
from typing import TYPE_CHECKING

from lowband.commands import positive
from lowband.errors import UserError

if TYPE_CHECKING:
    from lowband.predict.whole import Conditions
    from lowband.predict.workload import Workload

_FAILING = ("hours_between_failures", "checkpoint_seconds", "restart_minutes")


def add(parser: argparse.ArgumentParser, of: str) -> None:
    """of: whose run it is"""
    parser.add_argument(
        "--tokens", type=positive, metavar="N", help=f"of a whole run: days, GPU-hours, energy of {of}"
    )
    parser.add_argument(
        "--hours-between-failures", type=positive, metavar="H",
        help="of one rank, the mean (Llama 3: 50,700); with --tokens",
    )  # fmt: skip
    parser.add_argument(
        "--restart-minutes", type=positive, metavar="M", help="after a failure, until training goes on"
    )
    parser.add_argument(
        "--checkpoint-seconds", type=positive, metavar="S", help="for which training waits for a checkpoint"
    )


def conditions(options: argparse.Namespace, elsewhere: Sequence[str] = ()) -> "Conditions | None":
    """Of a whole run, if it is asked for. elsewhere: options, of those given, that ask for other text

    Raises UserError for options that say nothing together.
    """
    from lowband.predict.whole import HOUR_S, Conditions

    hours, seconds, minutes = (getattr(options, name) for name in _FAILING)
    given = [f"--{name.replace('_', '-')}" for name in _FAILING if getattr(options, name)]
    if options.tokens is None:
        if given:
            raise UserError(f"{given[0]} is for a run of --tokens")
        return None
    if options.json or options.csv:
        raise UserError("--tokens is without --json and --csv")
    if elsewhere:
        raise UserError(f"--tokens is without {elsewhere[0]}")
    if given and (hours is None or seconds is None):
        needed = "--hours-between-failures with --checkpoint-seconds, and --restart-minutes or not"
        raise UserError(f"{given[0]} is not alone", allowed=needed)
    return Conditions(options.tokens, hours and hours * HOUR_S, 60 * (minutes or 0.0), seconds or 0.0)


def lines(job: "Workload", given: "Conditions") -> list[str]:
    from lowband.predict.prediction import predict
    from lowband.predict.show.whole_text import lines
    from lowband.predict.whole import whole_run

    return ["", *lines(whole_run(job, predict(job), given), given)]
