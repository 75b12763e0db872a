"""bench-comm, bench-routes, box lengths: what is measured on a box's shaped links."""

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lowband.commands import add_verb, at_least_one, function_of, write_environment

if TYPE_CHECKING:
    from lowband.spec.machine import Machine

LENGTHS = "a batch of many lengths: as planned, by one degree, padded"


def add(commands: Any) -> None:
    comm, routes = "bench.comm:time_collectives", "run.route_times:time_routes"
    for name, text, one, rows_of in (
        ("comm", "time the engine's collectives on a box's links", "collective", comm),
        ("routes", "time tokens' ways to experts on a box's links", "forward", routes),
    ):
        example = f"--cluster frontier-box --ranks 16 --out results/{name}"
        bench = add_verb(commands, _bench, f"bench-{name}", text, example)
        bench.add_argument("--ranks", type=at_least_one, required=True)
        bench.add_argument(
            "--seconds", type=float, default=1.0, help=f"target duration of one {one} at the links' rates"
        )
        bench.add_argument("--repeats", type=at_least_one, default=5)
        _add_common(bench, "frontier-box", name)
        bench.set_defaults(table=name, rows_of=rows_of)


def add_lengths(verbs: Any) -> None:
    """A verb of `lowband box`."""
    lengths = verbs.add_parser("lengths", help=LENGTHS)
    lengths.add_argument("--model", default="gpt-200k-4-heads", help="a name of config/models.yaml")
    lengths.add_argument("--lengths", type=Path, required=True, help="of the batch's sequences, one a line")
    lengths.add_argument("--room", type=at_least_one, required=True, help="tokens that a rank has room for")
    lengths.add_argument("--ranks", type=at_least_one, default=8)
    lengths.add_argument("--steps", type=at_least_one, default=3, help="after one that is not counted")
    _add_common(lengths, "context-box", "lengths")
    lengths.set_defaults(run=_lengths)


def _add_common(bench: argparse.ArgumentParser, cluster: str, table: str) -> None:
    bench.add_argument("--cluster", default=cluster, help="a folder of slurm/ that describes a box")
    bench.add_argument("--out", type=Path, required=True, help=f"folder of {table}.csv and env.json")
    bench.add_argument("--links", choices=["here"], help=argparse.SUPPRESS)


def _bench(options: argparse.Namespace) -> None:
    from lowband.errors import UserError

    machine = _machine(options)
    if not 0 < options.seconds <= 30:
        raise UserError(f"{options.seconds}", where="--seconds", allowed="more than 0, at most 30")
    _enter(options)
    rows_of = function_of(options.rows_of)
    rows = lambda: rows_of(machine, options.ranks, options.seconds, options.repeats)  # noqa: E731
    _write(options, options.table, rows, "ones", "--repeats")


def _lengths(options: argparse.Namespace) -> None:
    import pandas as pd

    from lowband.evidence.validation.scale_model import box_costs
    from lowband.predict.search.lengths_cost import read_lengths
    from lowband.predict.search.lengths_tasks import plans, tasks
    from lowband.spec.config import Config

    machine, model = _machine(options), Config().model(options.model)
    batch = read_lengths(options.lengths, model)
    costs = box_costs(machine, model, options.ranks, options.room)
    found = plans(batch, options.ranks, costs, [*costs.seconds])
    given = {name: tasks(batch, plan, costs, name == "padded") for name, plan in found.items()}
    predicted = {name: plan.seconds for name, plan in found.items()}
    _enter(options)

    from lowband.run.paced_lengths import measure

    job = machine, model, batch, given, predicted, options.ranks, options.steps
    frame = _write(options, "lengths", lambda: measure(*job), "drawn", "--steps")
    shown = frame.groupby("way", sort=False)[["step_s", "predicted_s", "tokens_per_s"]]
    print(pd.DataFrame(shown.median()))


def _machine(options: argparse.Namespace) -> "Machine":
    """Raises UserError for one that describes no box, and for ranks that do not fill its levels."""
    from lowband.box.layout import Layout
    from lowband.errors import UserError
    from lowband.spec.config import Config

    machine = Config().machine(options.cluster)
    if machine.box is None:
        what = f"'{options.cluster}' does not describe a box"
        raise UserError(what, where="--cluster", allowed="frontier-box, ...")
    Layout.of(machine, options.ranks)
    return machine


def _enter(options: argparse.Namespace) -> None:
    """Go on in a private network."""
    from lowband.box import links
    from lowband.box.network import start_privately
    from lowband.errors import UserError

    options.out.mkdir(parents=True, exist_ok=True)  # fail before minutes are spent
    if options.links is None:
        if reason := links.missing():
            raise UserError(f"no shaped links here: {reason}")
        start_privately()


def _write(
    options: argparse.Namespace, table: str, rows: Callable[[], Sequence[Any]], data: str, fewer: str
) -> Any:
    """Measure, and write the table and what it was measured on. Returns it."""
    import pandas as pd

    from lowband.errors import UserError
    from lowband.run.launch import RankFailure, TimeLimit
    from lowband.spec.csv_tables import write_csv

    try:
        frame = pd.DataFrame(rows())
    except RankFailure as failure:
        raise UserError(failure.cause) from None
    except TimeLimit:
        raise UserError("it took longer than its time limit", allowed=f"fewer {fewer}") from None
    write_csv(frame, options.out / f"{table}.csv")
    write_environment(options.out, source=f"none: {data}", links="shaped")
    return frame
