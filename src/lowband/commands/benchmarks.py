"""bench-softmax, ...: the benchmarks of this machine, a sub-command for each entry of spec/benchmarks.py."""

import argparse
from pathlib import Path
from typing import Any

from lowband.spec.benchmarks import BENCHMARKS


def add(commands: Any) -> None:
    for name, benchmark in BENCHMARKS.items():
        files = ", ".join([*(f"{table}.csv" for table in benchmark.tables), f"{name}_env.json"])
        bench = commands.add_parser(f"bench-{name}", help=benchmark.help)
        bench.add_argument("--out", type=Path, required=True, help=f"folder of {files}")
        bench.set_defaults(run=_bench, name=name)


def _bench(options: argparse.Namespace) -> None:
    import json
    from importlib import import_module

    import pandas as pd

    from lowband.spec.benchmarks import Measured
    from lowband.spec.csv_tables import write_csv
    from lowband.spec.files import write_whole

    options.out.mkdir(parents=True, exist_ok=True)  # fail before a minute is spent
    measured: Measured = import_module(f"lowband.bench.{options.name}").bench()
    for table, row in BENCHMARKS[options.name].tables.items():
        write_csv(pd.DataFrame(measured.tables[table], columns=row._fields), options.out / f"{table}.csv")
    write_whole(options.out / f"{options.name}_env.json", json.dumps(measured.environment, indent=2) + "\n")
    print("\n".join(measured.lines))
