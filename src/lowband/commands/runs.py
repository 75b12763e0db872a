"""spec, train, preflight, curves: run specs from the configuration, the runs themselves, their curves."""

import argparse
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lowband.commands import add_verb, at_least_one, root
from lowband.errors import UserError

if TYPE_CHECKING:
    from lowband.spec.config import Config
    from lowband.spec.run import RunSpec
    from lowband.spec.run_folder import RunFolder


def add(commands: Any) -> None:
    spec = add_verb(
        commands, _spec, "spec", "spec.json of every run of a suite; schemes to and from peers",
        "--suite smoke --out results/smoke/runs",
        "With --sbatch, beside each spec.json a script to submit by hand, with the options that the "
        "workflow would give. Also converts a scheme to a peer's configuration (--scheme, --to) or from "
        "it (--from).",
    )  # fmt: skip
    what = spec.add_mutually_exclusive_group(required=True)
    what.add_argument("--suite", nargs="+", help="names in config/suites/; their runs go to --out")
    what.add_argument(
        "--scheme", help="a name in config/schemes.yaml, to convert --to a peer's configuration"
    )
    what.add_argument("--from", type=Path, dest="source", help="DeepSpeed JSON, to convert into a scheme")
    spec.add_argument("--out", type=Path, help="folder of run folders")
    spec.add_argument(
        "--sbatch", action="store_true",
        help="with --suite: also write job.sbatch; $SLURM_PROJECT is its account, $SLURM_PART and "
        "$SLURM_QOS may replace partition and QOS of the cluster's job.yaml",
    )  # fmt: skip
    spec.add_argument("--to", choices=("deepspeed", "fsdp2"))
    spec.add_argument("--cluster", help="whose levels --scheme and --from refer to (default: local)")
    spec.add_argument("--ranks", type=at_least_one, help="over how many ranks")
    spec.add_argument("--root", type=root, default=Path(), help="folder that holds config/ and slurm/")

    train = add_verb(
        commands, _train, "train", "train the run of a spec.json, in its folder",
        "results/smoke/runs/gpt-200k-zero3/spec.json",
        "Under torchrun or srun this process is one rank, or a node's; else it starts all ranks.",
    )  # fmt: skip
    train.add_argument("spec", type=Path)
    train.add_argument(
        "--links",
        choices=["auto", "private", "plain", "here"],
        metavar="{auto,private,plain}",  # `here` is how the command restarts itself in a private network
        default="auto",
        help="for a run in a box: its own network with shaped links (private), plain loopback, or private "
        "where available (auto, the default)",
    )

    train.add_argument("--again", action="store_true", help="also if it has ended well: its rows are lost")

    preflight = add_verb(
        commands, _preflight, "preflight", "measure on a run's nodes what would go wrong, in two minutes",
        "results/mine/runs/RUN/spec.json",
    )  # fmt: skip
    preflight.add_argument(
        "spec", type=Path, help="the run's spec.json; start it as the run, by srun or torchrun"
    )
    preflight.add_argument(
        "--links", choices=["auto", "private", "plain", "here"], default="auto", help=argparse.SUPPRESS
    )

    curves = add_verb(
        commands, _curves, "curves", "training curves of runs to TensorBoard, W&B or MLflow",
        "results/smoke --to tensorboard --out curves",
        "Offline, unless WANDB_MODE or MLFLOW_TRACKING_URI are set.",
    )  # fmt: skip
    curves.add_argument("folder", type=Path, help="results/<name>, or the folder of one run")
    curves.add_argument("--to", required=True, choices=("tensorboard", "wandb", "mlflow"))
    curves.add_argument("--out", type=Path, required=True, help="folder to write into")
    curves.add_argument("--follow", action="store_true", help="until every run has ended")


def _spec(options: argparse.Namespace) -> None:
    from lowband.spec.config import Config

    config = Config(options.root)
    _check_spec(options)
    if options.suite is None:
        from lowband.spec.exchange import export_scheme, import_scheme

        cluster = options.cluster or "local"
        if options.scheme is not None:
            print(export_scheme(config, options.scheme, cluster, options.ranks, options.to))
        else:
            print(import_scheme(config, options.source, cluster, options.ranks))
        return
    from lowband.spec.files import write_if_changed
    from lowband.spec.run_folder import RunFolder

    specs = config.runs(list(dict.fromkeys(options.suite)))
    folders = {spec.run_id: RunFolder(options.out / spec.run_id) for spec in specs}
    scripts = _scripts(config, specs, folders) if options.sbatch else {}
    for spec in specs:
        folder = folders[spec.run_id]
        write_if_changed(folder.spec, spec.to_json())
        if spec.run_id in scripts:
            write_if_changed(folder.batch_script, scripts[spec.run_id])
        print(folder.batch_script if options.sbatch else folder.spec)


# Of each thing that is asked for: what it needs, and what it may have.
_ASKED = {
    "--suite": (["--out"], ["--sbatch"]),
    "--scheme": (["--ranks", "--to"], ["--cluster"]),
    "--from": (["--ranks"], ["--cluster"]),
}
_VALUES = {"--out": "a folder", "--ranks": "over how many ranks", "--to": ("deepspeed", "fsdp2")}


def _check_spec(options: argparse.Namespace) -> None:
    """Raises UserError for an option that is missing, and for one that would be ignored."""
    asked = "--from" if options.source else "--suite" if options.suite else "--scheme"
    needed, may = _ASKED[asked]
    for option in ("--sbatch", "--out", "--to", "--cluster", "--ranks"):
        if option not in (*needed, *may) and getattr(options, option[2:]):
            raise UserError(f"is not for {asked}", where=option, allowed=[*needed, *may])
    for option in needed:
        if getattr(options, option[2:]) is None:
            raise UserError("is missing", where=option, allowed=_VALUES[option])


def _scripts(config: "Config", specs: list["RunSpec"], folders: dict[str, "RunFolder"]) -> dict[str, str]:
    """By run: its batch script. Raises UserError for a cluster without Slurm, before anything is written."""
    from lowband.spec.batch_script import batch_script

    scripts = {}
    for spec in specs:
        cluster = spec.machine.name
        if not config.has_slurm(cluster):
            raise UserError(f"cluster '{cluster}' has no job.yaml", where="--sbatch", allowed="a site's")
        job = config.job(cluster)
        file = folders[spec.run_id].spec
        scripts[spec.run_id] = batch_script(job, spec, file, Path(sys.executable), os.environ)
    return scripts


def _train(options: argparse.Namespace) -> int:
    from lowband.box.network import connect
    from lowband.run.ranks import is_first_process, is_launched
    from lowband.spec.run import RunSpec
    from lowband.spec.run_folder import RunFolder

    links = connect(
        RunSpec.read_json(options.spec), options.links, is_launched()
    )  # before torch: may restart us

    from lowband.run.ending import exit_code
    from lowband.run.train import train

    outcome = train(options.spec, links, options.again)
    if is_first_process():
        print(f"{options.spec.parent.name}: {outcome.status}, {outcome.steps} steps {outcome.cause}".rstrip())
        for slow in outcome.slow:
            print(f"{options.spec.parent.name}: {slow}")
    return _leave(exit_code(outcome, RunFolder(options.spec.parent)))


def _preflight(options: argparse.Namespace) -> int:
    from lowband.box.network import connect
    from lowband.run.ranks import is_launched
    from lowband.spec.run import RunSpec

    links = connect(
        RunSpec.read_json(options.spec), options.links, is_launched()
    )  # before torch: may restart us

    from lowband.preflight.main import preflight

    return _leave(preflight(options.spec, links))


def _curves(options: argparse.Namespace) -> None:
    from lowband.run.export_curves import export

    export(options.folder, options.to, options.out, options.follow, print)


def _leave(code: int) -> int:
    """The exit code; a process that was a rank ends here."""
    from lowband.run.ranks import is_launched

    if is_launched():
        # torch 2.13 with gloo may abort in its thread pool's exit handlers.
        sys.stdout.flush()
        os._exit(code)
    return code
