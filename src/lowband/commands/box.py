"""box: the scale model of a machine."""

import argparse
from pathlib import Path
from typing import Any


def add(commands: Any) -> None:
    box = commands.add_parser("box", help="a scale model of a machine: a Slurm cluster on shaped links")
    verbs = box.add_subparsers(metavar="VERB", required=True)
    for verb, text in (
        ("up", "bring up a box that stays (root)"),
        ("down", "take it down, and what a killed one has left"),
        ("status", "which box is up"),
        ("run", "run a command in a box of its own (any user)"),
    ):
        parsed = verbs.add_parser(verb, help=text)
        if verb in ("up", "run"):
            parsed.add_argument("--cluster", default="frontier-box", help="a folder of slurm/")
        if verb == "run":
            parsed.add_argument("command", nargs="+", help="after --")
        parsed.set_defaults(run=_box, verb=verb)


def _box(options: argparse.Namespace) -> int:
    from lowband.box import cluster

    if options.verb == "run":
        return cluster.run(Path(), options.cluster, options.command)
    if options.verb == "up":
        print(cluster.up(Path(), options.cluster))
    else:
        print(cluster.down() if options.verb == "down" else cluster.status())
    return 0
