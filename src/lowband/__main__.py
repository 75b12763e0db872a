"""The command line: parsing only. `python -m lowband COMMAND --help` lists the options of each."""

import argparse
import os
import sys
from pathlib import Path

from lowband.commands import at_least_one, box, kernels, peers, predict, report, softmax
from lowband.errors import UserError


def main(arguments: list[str] | None = None) -> int:
    """Run a sub-command; returns the exit code (2 for bad input, reported in one line)."""
    options = _parser().parse_args(arguments)
    try:
        code = int(options.run(options) or 0)
        sys.stdout.flush()  # here, where a closed pipe can be caught
        return code
    except BrokenPipeError:  # the reader of the output has closed it
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # so that exit does not flush the rest
        return 0
    except KeyboardInterrupt:
        return 130
    except OSError as error:
        if error.filename is None:
            raise
        print(f"lowband: {error.filename}: {error.strerror}", file=sys.stderr)
        return 2
    except UserError as error:
        print(f"lowband: {error}", file=sys.stderr)
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="lowband", description="Partitioned LLM training, measured.")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)

    spec = commands.add_parser(
        "spec", help="write the spec.json of every run of some suites; a scheme to or from a peer's words"
    )
    what = spec.add_mutually_exclusive_group(required=True)
    what.add_argument("--suite", nargs="+", help="names in config/suites/; their runs go to --out")
    what.add_argument("--scheme", help="a name in config/schemes.yaml, to be said --to a peer")
    what.add_argument("--from", type=Path, dest="source", help="DeepSpeed JSON, to be read into a scheme")
    spec.add_argument("--out", type=Path, help="folder of run folders")
    spec.add_argument("--to", choices=("deepspeed", "fsdp2"))
    spec.add_argument("--cluster", default="local", help="whose levels --scheme and --from mean")
    spec.add_argument("--ranks", type=at_least_one, help="over how many ranks")
    spec.add_argument("--root", type=Path, default=Path(), help="folder that holds config/ and slurm/")
    spec.set_defaults(run=_spec)

    train = commands.add_parser(
        "train",
        help="train as a spec.json says, into its folder; a rank under torchrun or srun, else locally",
    )
    train.add_argument("spec", type=Path)
    train.add_argument(
        "--links",
        choices=["auto", "private", "plain", "here"],
        metavar="{auto,private,plain}",  # `here` is how the command restarts itself in a private network
        default="auto",
        help="of a box's run: a network of its own with shaped links (private), plain loopback, or private "
        "where it can be had (auto, the default)",
    )
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

    box.add(commands)
    peers.add(commands)
    predict.add(commands)
    softmax.add(commands)
    kernels.add(commands)
    report.add(commands)

    doctor = commands.add_parser("doctor", help="what this machine has and what that allows")
    doctor.set_defaults(run=_doctor)
    return parser


def _spec(options: argparse.Namespace) -> None:
    if options.suite is None:
        from lowband.spec.exchange import export_scheme, import_scheme

        if options.ranks is None or (options.scheme and options.to is None):
            raise UserError("is missing", where="--ranks" if options.ranks is None else "--to")
        if options.scheme:
            print(export_scheme(options.root, options.scheme, options.cluster, options.ranks, options.to))
        else:
            print(import_scheme(options.root, options.source, options.cluster, options.ranks))
        return
    if options.out is None:
        raise UserError("is missing", where="--out", allowed="a folder")
    from lowband.spec.files import write_if_changed
    from lowband.spec.records import RunFolder
    from lowband.spec.suites import expand

    for spec in expand(options.root, options.suite):
        folder = RunFolder(options.out / spec.run_id)
        write_if_changed(folder.spec, spec.to_json())
        print(folder.spec)


def _train(options: argparse.Namespace) -> int:
    from lowband.box.network import connect
    from lowband.run.ranks import is_first_process, is_launched
    from lowband.spec.records import RunFolder
    from lowband.spec.run import RunSpec

    links = connect(RunSpec.read_json(options.spec), options.links)  # before torch: it may restart us

    from lowband.run.ending import exit_code
    from lowband.run.train import train

    outcome = train(options.spec, links)
    if is_first_process():
        print(f"{options.spec.parent.name}: {outcome.status}, {outcome.steps} steps {outcome.cause}".rstrip())
    code = exit_code(outcome, RunFolder(options.spec.parent))
    if is_launched():
        # This process was a rank: torch 2.13 with gloo may abort in its thread pool's exit handlers.
        sys.stdout.flush()
        os._exit(code)
    return code


def _collect(options: argparse.Namespace) -> None:
    from lowband.tables.collect import collect

    collect(options.runs, options.out)


def _table(options: argparse.Namespace) -> None:
    from lowband.tables.build import write_table

    write_table(options.name, options.tables, options.out or options.tables)


def _figure(options: argparse.Namespace) -> None:
    from lowband.report.figures import write_figure

    write_figure(options.name, options.tables, options.out)


def _doctor(_options: argparse.Namespace) -> None:
    from lowband.run.doctor import examine

    print(examine())


if __name__ == "__main__":
    sys.exit(main())
