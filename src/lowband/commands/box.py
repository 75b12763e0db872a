"""box: the scale model of a machine."""

import argparse
from pathlib import Path
from typing import Any

from lowband.commands import add_verb
from lowband.commands.box_benches import add_lengths


def add(commands: Any) -> None:
    box = add_verb(
        commands, _box, "box", "a scale model of a machine: a Slurm cluster on shaped links",
        "run --cluster frontier-box -- srun --nodes 2 hostname",
    )  # fmt: skip
    verbs = box.add_subparsers(metavar="VERB", required=True)
    for verb, text in (
        ("up", "bring up a box that stays (root)"),
        ("down", "take it down, with any leftovers of a killed one"),
        ("status", "which box is up"),
        ("run", "run a command in a box of its own (any user)"),
        ("jobs", "inside a box: time that Slurm and Snakemake added to its runs"),
    ):
        parsed = verbs.add_parser(verb, help=text)
        if verb in ("up", "run"):
            parsed.add_argument("--cluster", default="frontier-box", help="a folder of slurm/")
        if verb == "run":
            parsed.add_argument("command", nargs="+", help="after --")
        if verb == "jobs":
            parsed.add_argument("runs", type=Path, help="results/<name>/runs")
            parsed.add_argument("--out", type=Path, required=True, help="file to write: jobs.csv")
        parsed.set_defaults(verb=verb)
    add_lengths(verbs)


def _box(options: argparse.Namespace) -> int:
    from lowband.box import cluster

    if options.verb == "run":
        return cluster.run(Path(), options.cluster, options.command)
    if options.verb == "jobs":
        return _jobs(options)
    if options.verb == "up":
        print(cluster.up(Path(), options.cluster))
    else:
        print(cluster.down() if options.verb == "down" else cluster.status())
    return 0


def _jobs(options: argparse.Namespace) -> int:
    import pandas as pd

    from lowband.box.jobs import job_times
    from lowband.spec.csv_tables import write_csv

    rows = pd.DataFrame(job_times(options.runs))
    write_csv(rows, options.out)
    print(rows.to_string(index=False, float_format="%.1f"))
    return 0
