"""import-log, faults: other projects' logs and peers' faults."""

import argparse
import sys
from pathlib import Path
from typing import Any

from lowband.commands import add_verb, at_least_one, root


def add(commands: Any) -> None:
    log = add_verb(
        commands, _import_log, "import-log", "another project's log -> a tidy CSV",
        "train.log --format torchtitan --model gpt-10b --seq-len 2048 --ranks 64 --out steps.csv",
    )  # fmt: skip
    log.add_argument("log", type=Path)
    formats = "megatron-lm", "megatron-deepspeed", "deepspeed", "torchtitan", "mllog"
    log.add_argument("--format", required=True, choices=formats)
    log.add_argument("--model", required=True, help="a name in config/models.yaml")
    log.add_argument("--seq-len", type=at_least_one, required=True)
    log.add_argument("--ranks", type=at_least_one, required=True)
    log.add_argument("--recompute", action="store_true", help="activations were recomputed")
    log.add_argument("--out", type=Path, required=True, help="the CSV")
    log.add_argument("--root", type=root, default=Path(), help="folder that holds config/")

    faults = add_verb(
        commands, _faults, "faults", "run the experiments that demonstrate peers' faults",
        "--out results/faults",
    )  # fmt: skip
    faults.add_argument("--out", type=Path, required=True, help="folder of faults.csv")


def _import_log(options: argparse.Namespace) -> None:
    from lowband.evidence.importers import ForeignRun, import_log
    from lowband.spec.config import Config

    model = Config(options.root).model(options.model)
    run = ForeignRun(model, options.seq_len, options.ranks, options.recompute)
    for message in import_log(options.log, options.format, run, options.out):
        print(message, file=sys.stderr)


def _faults(options: argparse.Namespace) -> None:
    import pandas as pd

    from lowband.bench.peer_faults import find_faults
    from lowband.spec.csv_tables import write_csv

    options.out.mkdir(parents=True, exist_ok=True)  # fail before minutes are spent
    write_csv(pd.DataFrame(find_faults()), options.out / "faults.csv")
