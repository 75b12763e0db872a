"""box, bench-comm, bench-routes: the scale model of a machine."""

import argparse
from pathlib import Path
from typing import Any

from lowband.commands import add_verb, at_least_one, function_of


def add(commands: Any) -> None:
    box = add_verb(
        commands, "box", "a scale model of a machine: a Slurm cluster on shaped links",
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
        parsed.set_defaults(run=_box, verb=verb)

    for name, text, one, rows_of in (
        (
            "comm",
            "time the engine's collectives on a box's links",
            "collective",
            "bench.comm:time_collectives",
        ),
        ("routes", "time tokens' ways to experts on a box's links", "forward", "run.route_times:time_routes"),
    ):
        example = f"--cluster frontier-box --ranks 16 --out results/{name}"
        bench = add_verb(commands, f"bench-{name}", text, example)
        bench.add_argument(
            "--cluster", default="frontier-box", help="a folder of slurm/ that describes a box"
        )
        bench.add_argument("--ranks", type=at_least_one, required=True)
        bench.add_argument(
            "--seconds", type=float, default=1.0, help=f"target duration of one {one} at the links' rates"
        )
        bench.add_argument("--repeats", type=at_least_one, default=5)
        bench.add_argument("--out", type=Path, required=True, help=f"folder of {name}.csv and env.json")
        bench.add_argument("--links", choices=["here"], help=argparse.SUPPRESS)
        bench.set_defaults(run=_bench, table=name, rows_of=rows_of)


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


def _bench(options: argparse.Namespace) -> None:
    from lowband.box import links
    from lowband.box.layout import Layout
    from lowband.box.network import start_privately
    from lowband.errors import UserError
    from lowband.spec.config import Config

    machine = Config().machine(options.cluster)
    if machine.box is None:
        raise UserError(
            f"'{options.cluster}' does not describe a box", where="--cluster", allowed="frontier-box, ..."
        )
    if not 0 < options.seconds <= 30:
        raise UserError(f"{options.seconds}", where="--seconds", allowed="more than 0, at most 30")
    Layout.of(machine, options.ranks)  # raises if the ranks do not fill the levels
    options.out.mkdir(parents=True, exist_ok=True)  # fail before minutes are spent
    if options.links is None:
        reason = links.missing()
        if reason:
            raise UserError(f"no shaped links here: {reason}")
        start_privately()

    import pandas as pd
    import torch

    from lowband.run.environment import describe, host
    from lowband.run.launch import RankFailure, TimeLimit
    from lowband.spec.csv_tables import write_csv
    from lowband.spec.files import write_whole

    try:
        rows = function_of(options.rows_of)(machine, options.ranks, options.seconds, options.repeats)
    except RankFailure as failure:
        raise UserError(failure.cause) from None
    except TimeLimit:
        raise UserError(
            "the collectives took longer than their time limit", allowed="fewer --repeats"
        ) from None
    write_csv(pd.DataFrame(rows), options.out / f"{options.table}.csv")
    environment = describe((host(),), torch.device("cpu"), "gloo", {"source": "none: ones"}, "shaped")
    write_whole(options.out / "env.json", environment.to_json())
