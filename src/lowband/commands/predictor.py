"""validate, calibrate, simulate, bench-predict: whether the performance model is right, and how fast."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lowband.commands import add_verb, at_least_one, root
from lowband.commands.predict import STACK

if TYPE_CHECKING:
    from lowband.spec.config import Config


def add(commands: Any) -> None:
    bench = add_verb(commands, _bench_predict, "bench-predict", "how fast the predictor is here, as JSON", "")
    bench.add_argument("--root", type=root, default=Path())

    validate = add_verb(
        commands, _validate, "validate", "published runs beside their predictions -> tables",
        "--out results/mine/tables",
    )  # fmt: skip
    validate.add_argument("--out", type=Path, required=True)
    alone = validate.add_mutually_exclusive_group()
    alone.add_argument(
        "--lengths", action="store_true", help="alone FlexSP's ratios, by its solver's constants (minutes)"
    )
    alone.add_argument(
        "--cells", action="store_true", help="alone the ten cells of ways along context, and their suite"
    )
    validate.add_argument("--root", type=root, default=Path())

    _add_calibrate(commands)

    simulate = add_verb(
        commands, _simulate, "simulate", "collectives in closed form beside SimGrid's simulation",
        "--gpus 16 64 --out results/simgrid",
    )  # fmt: skip
    simulate.add_argument("--cluster", default="frontier", help="a folder of slurm/, or a machine file")
    simulate.add_argument("--stack", help=STACK)
    simulate.add_argument("--model", default="gpt-20b", help="a name of config/models.yaml, or a file")
    simulate.add_argument("--scheme", nargs="+", default=["zero3", "zeropp", "hsdp", "hier3"])
    simulate.add_argument("--gpus", type=at_least_one, nargs="+", default=[16, 64, 384], help="ranks")
    simulate.add_argument("--python", default="/usr/bin/python3", help="a Python that has simgrid")
    simulate.add_argument("--out", type=Path, required=True, help="folder of simgrid.csv")
    simulate.add_argument("--root", type=root, default=Path())


def _add_calibrate(commands: Any) -> None:
    calibrate = add_verb(
        commands, _calibrate, "calibrate", "fit a cluster's fitted constants again, within their bounds",
        "frontier",
    )  # fmt: skip
    calibrate.add_argument("clusters", nargs="*", help="folders of slurm/ (default: all with fitted ones)")
    calibrate.add_argument(
        "--folds",
        action="store_true",
        help="cross-validate: fit without a size, a scale, a machine (minutes)",
    )
    calibrate.add_argument("--out", type=Path, help="folder of within_bounds.csv; folds.csv and held_out.csv")
    calibrate.add_argument("--root", type=root, default=Path())


def _bench_predict(options: argparse.Namespace) -> None:
    import json

    from lowband.bench.predictor import bench

    print(json.dumps(bench(options.root), indent=2))


def _validate(options: argparse.Namespace) -> None:
    from lowband.evidence.validation.tables import write_cells, write_lengths, write_predicted
    from lowband.spec.config import Config

    options.out.mkdir(parents=True, exist_ok=True)  # fail before minutes are spent
    alone = write_lengths if options.lengths else write_cells if options.cells else None
    (alone or write_predicted)(Config(options.root), options.out)


def _simulate(options: argparse.Namespace) -> None:
    import pandas as pd

    from lowband.evidence.validation.contention import check
    from lowband.spec.config import Config
    from lowband.spec.csv_tables import write_csv

    options.out.mkdir(parents=True, exist_ok=True)  # fail before minutes are spent
    config = Config(options.root)
    machine, model = config.given_machine(options.cluster), config.given_model(options.model)
    stack = config.given_stack(options.stack, machine)
    schemes = [config.given_scheme(name) for name in options.scheme]
    rows = [
        row for ranks in options.gpus for row in check(options.python, machine, stack, model, schemes, ranks)
    ]
    write_csv(pd.DataFrame(rows), options.out / "simgrid.csv")


def _calibrate(options: argparse.Namespace) -> int:
    from lowband.evidence.validation.fit import fit, fitted_clusters, table
    from lowband.spec.config import Config
    from lowband.spec.csv_tables import write_csv

    config = Config(options.root)
    if options.out:
        options.out.mkdir(parents=True, exist_ok=True)  # fail before minutes are spent
    if options.folds:
        return _cross_validate(config, options.clusters, options.out)
    found = [one for name in options.clusters or fitted_clusters(config) for one in fit(config, name)]
    for one in found:
        bounds = f"{one.lower_bound:g} to {one.upper_bound:g}"
        print(f"{one.cluster} {one.constant}: {one.within:g} (file: {one.value:g}; {bounds}: {one.place})")
    if options.out:
        write_csv(table(found), options.out / "within_bounds.csv")
    return int(any((one.value_place, one.place) != ("inside", "inside") for one in found))


def _cross_validate(config: "Config", clusters: list[str], out: Path | None) -> int:
    from lowband.evidence.validation.folds import cross_validate
    from lowband.spec.csv_tables import write_csv

    folds, held_out = cross_validate(config, clusters)
    print(folds.drop(columns="provenance").to_string(index=False))
    if out:
        write_csv(folds, out / "folds.csv")
        write_csv(held_out, out / "held_out.csv")
    return 0
