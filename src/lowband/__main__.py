"""The command line: parsing only. `python -m lowband COMMAND --help` tells what each takes."""

import argparse
import csv
import dataclasses
import sys
from pathlib import Path
from typing import Any

from lowband.errors import UserError

RECOMPUTE = ["none", "selective", "op", "full"]


def main(arguments: list[str] | None = None) -> int:
    """Run a sub-command; returns the exit code (2 for bad input, told in one line)."""
    options = _parser().parse_args(arguments)
    try:
        return int(options.run(options) or 0)
    except UserError as error:
        print(f"lowband: {error}", file=sys.stderr)
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="lowband", description="Partitioned LLM training, measured.")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)

    spec = commands.add_parser("spec", help="write the spec.json of every run of some suites")
    spec.add_argument("--suite", nargs="+", required=True, help="names in config/suites/")
    spec.add_argument("--out", type=Path, required=True, help="folder of run folders")
    spec.add_argument("--root", type=Path, default=Path(), help="folder that holds config/ and slurm/")
    spec.set_defaults(run=_spec)

    train = commands.add_parser(
        "train",
        help="train as a spec.json says, into its folder; a rank under torchrun or srun, else locally",
    )
    train.add_argument("spec", type=Path)
    train.set_defaults(run=_train)

    collect = commands.add_parser("collect", help="run folders -> raw tables")
    collect.add_argument("runs", type=Path, nargs="+")
    collect.add_argument("--out", type=Path, required=True)
    collect.set_defaults(run=_collect)

    table = commands.add_parser("table", help="raw tables -> a derived table")
    table.add_argument("name")
    table.add_argument("--tables", type=Path, required=True, help="folder of what it is made of")
    table.add_argument("--out", type=Path, help="folder that it is written to (default: --tables)")
    table.set_defaults(run=_table)

    figure = commands.add_parser("figure", help="a table -> a figure (PDF, PNG, CSV)")
    figure.add_argument("name")
    figure.add_argument("--tables", type=Path, required=True)
    figure.add_argument("--out", type=Path, required=True)
    figure.set_defaults(run=_figure)

    claims = commands.add_parser("claims", help="grade the claims against the tables")
    claims.add_argument("--claims", type=Path, default=Path("config/claims.yaml"))
    claims.add_argument("--tables", type=Path, required=True)
    claims.set_defaults(run=_claims)

    summary = commands.add_parser("summary", help="which claims hold, and where tables and figures lie")
    summary.add_argument("--tables", type=Path, required=True)
    summary.add_argument("--figures", type=Path, required=True)
    summary.set_defaults(run=_summary)

    _add_predictor(commands)

    doctor = commands.add_parser("doctor", help="what this machine has and what that allows")
    doctor.set_defaults(run=_doctor)
    return parser


def _add_predictor(commands: Any) -> None:
    predict = commands.add_parser("predict", help="time and memory of a scheme on a cluster, item by item")
    _add_job(predict)
    predict.add_argument("--scheme", "--dp-scheme", nargs="+", required=True, help="names, or files")
    predict.add_argument("--micro-batch", nargs="+", type=int, default=[1], help="sequences per pass")
    predict.add_argument("--accumulation", nargs="+", type=int, default=[1], help="passes per step")
    predict.add_argument("--recompute", nargs="+", choices=RECOMPUTE, default=["full"])
    predict.add_argument("--tp", type=int, default=1, help="tensor-parallel ranks")
    predict.add_argument("--pp", type=int, default=1, help="pipeline stages")
    predict.add_argument("--interleave", type=int, default=1, help="virtual stages per rank")
    predict.add_argument("--schedule", choices=["1f1b", "breadth-first"], default="1f1b")
    out = predict.add_mutually_exclusive_group()
    out.add_argument("--json", action="store_true", help="an object, or an array of a grid's")
    out.add_argument("--csv", action="store_true")
    predict.set_defaults(run=_predict)

    plan = commands.add_parser("plan", help="the fastest placement, wires, batches and degrees that fit")
    _add_job(plan)
    plan.add_argument("--global-batch", type=int, help="sequences per step (default: 4 a rank)")
    plan.add_argument("--tp", nargs="+", type=int, help="degrees to try (default: powers of 2 in a node)")
    plan.add_argument("--pp", nargs="+", type=int, help="stages to try (default: powers of 2 to 16)")
    plan.add_argument(
        "--write", metavar="NAME", help="add the best scheme and a suite of this name to config/"
    )
    plan.set_defaults(run=_plan)

    bench = commands.add_parser("bench-predict", help="how fast the predictor is here, as JSON")
    bench.add_argument("--root", type=Path, default=Path())
    bench.set_defaults(run=_bench_predict)

    validate = commands.add_parser("validate", help="published runs beside their predictions -> tables")
    validate.add_argument("--out", type=Path, required=True)
    validate.add_argument("--root", type=Path, default=Path())
    validate.set_defaults(run=_validate)

    calibrate = commands.add_parser("calibrate", help="a cluster's fitted constants, fitted anew (minutes)")
    calibrate.add_argument("cluster")
    calibrate.add_argument("--root", type=Path, default=Path())
    calibrate.set_defaults(run=_calibrate)


def _add_job(parser: argparse.ArgumentParser) -> None:
    """What `predict` and `plan` share. A list makes a grid."""
    several = parser.prog.endswith("predict")
    parser.add_argument("--cluster", required=True, help="a folder of slurm/, or a machine file")
    parser.add_argument(
        "--model",
        required=True,
        nargs="+" if several else None,
        help="a name of config/models.yaml, or a file",
    )
    parser.add_argument("--gpus", required=True, type=int, nargs="+" if several else None, help="ranks")
    parser.add_argument(
        "--seq", type=int, nargs="+" if several else None, help="default: the model's longest"
    )
    parser.add_argument(
        "--stack", choices=["machine", "engine"], default="machine",
        help="the software that the machine file describes, or our engine with all of its overlap",
    )  # fmt: skip
    parser.add_argument("--root", type=Path, default=Path(), help="folder that holds config/ and slurm/")


def _predict(options: argparse.Namespace) -> None:
    import json

    from lowband.cost import show
    from lowband.cost.command import Grid

    names = {field.name for field in dataclasses.fields(Grid)}
    values = {key: value for key, value in vars(options).items() if key in names}
    records = Grid(**{**values, "seq": options.seq or [None]}).records()
    if options.json:
        print(json.dumps(records[0] if len(records) == 1 else records, indent=2))
    elif options.csv:
        writer = csv.DictWriter(sys.stdout, show.flat(records[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(show.flat(record) for record in records)
    else:
        print("\n\n".join(show.text(record) for record in records))


def _plan(options: argparse.Namespace) -> None:
    from lowband.cost import plan_files
    from lowband.cost.command import machine_of, model_of
    from lowband.cost.plan import plan

    model = model_of(options.root, options.model)
    found = plan(
        machine_of(options.root, options.cluster, options.stack), model, options.gpus,
        options.seq or model.seq_len, options.global_batch or 4 * options.gpus, options.tp, options.pp,
    )  # fmt: skip
    print(plan_files.report(found))
    if options.write:
        for path in plan_files.write(found.ranked[0], options.write, options.root):
            print(f"written: {path}")


def _bench_predict(options: argparse.Namespace) -> None:
    import json

    from lowband.cost.bench import bench

    print(json.dumps(bench(options.root), indent=2))


def _validate(options: argparse.Namespace) -> None:
    from lowband.report.predicted.write import write_predicted

    write_predicted(options.root, options.out)


def _calibrate(options: argparse.Namespace) -> None:
    from lowband.report.predicted.validate import fit

    for place, value in fit(options.root, options.cluster).items():
        print(f"{place}: {value:g}")


def _spec(options: argparse.Namespace) -> None:
    from lowband.spec.records import RunFolder, write_if_changed
    from lowband.spec.suites import expand

    for spec in expand(options.root, options.suite):
        folder = RunFolder(options.out / spec.run_id)
        write_if_changed(folder.spec, spec.to_json())
        print(folder.spec)


def _train(options: argparse.Namespace) -> int:
    from lowband.run.train import train

    outcome = train(options.spec)
    print(f"{options.spec.parent.name}: {outcome.status}, {outcome.steps} steps {outcome.cause}".rstrip())
    # Out of memory, out of time and NaN are results, rows of the table; an error is a failed job.
    return 1 if outcome.status == "error" else 0


def _collect(options: argparse.Namespace) -> None:
    from lowband.report.collect import collect

    collect(options.runs, options.out)


def _table(options: argparse.Namespace) -> None:
    from lowband.report.derive import write_table

    write_table(options.name, options.tables, options.out or options.tables)


def _figure(options: argparse.Namespace) -> None:
    from lowband.report.figures import write_figure

    write_figure(options.name, options.tables, options.out)


def _claims(options: argparse.Namespace) -> None:
    from lowband.report.claims import write_claims

    write_claims(options.claims, options.tables)


def _summary(options: argparse.Namespace) -> None:
    from lowband.report.claims import summary

    print(summary(options.tables / "claims.csv", options.tables, options.figures))


def _doctor(_options: argparse.Namespace) -> None:
    from lowband.run.doctor import examine

    print(examine())


if __name__ == "__main__":
    sys.exit(main())
