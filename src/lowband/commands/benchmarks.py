"""bench-softmax, ...: benchmarks of this machine: one for each entry of spec/benchmarks.py, bench-start."""

import argparse
from pathlib import Path
from typing import Any

from lowband.commands import add_verb
from lowband.spec.benchmarks import BENCHMARKS

# Several ways of a step in turns (bench/turns.py), by the module of bench/: help, more of it, and
# the columns by which medians are printed.
IN_TURNS = {
    "optimizers": (
        "time steps: AdamW on shards, Muon and Shampoo on matrices",
        "Takes five minutes.",
        ["ranks", "optimizer"],
    ),
    "orders": (
        "processor time of a step, depth-first and breadth-first",
        "Takes two minutes.",
        ["passes", "order"],
    ),
    "compile": (
        "time steps: blocks as they are, and compiled by torch",
        "Uses the GPU if there is one. Takes three minutes.",
        ["ranks", "engine", "blocks"],
    ),
    "joined": (
        "time steps: hops, joined hops, DDP and FSDP2, in turns",
        "Takes two minutes.",
        ["ranks", "scheme", "engine"],
    ),
}


def add(commands: Any) -> None:
    for name, benchmark in BENCHMARKS.items():
        files = ", ".join([*(f"{table}.csv" for table in benchmark.tables), f"{name}_env.json"])
        bench = add_verb(commands, f"bench-{name}", benchmark.help, f"--out results/{name}")
        bench.add_argument("--out", type=Path, required=True, help=f"folder of {files}")
        bench.set_defaults(run=_bench, name=name)
    start = add_verb(
        commands, "bench-start", "time starting 8 to 64 ranks, and reading a checkpoint of 1 GiB",
        "--out results/start", "Takes two minutes.",
    )  # fmt: skip
    start.add_argument("--out", type=Path, required=True, help="folder of start.csv, read.csv, env.json")
    start.add_argument("--root", type=Path, default=Path())
    start.set_defaults(run=_bench_start)
    for name, (text, more, by) in IN_TURNS.items():
        steps = add_verb(commands, f"bench-{name}", text, f"--out results/{name}", more)
        steps.add_argument("--out", type=Path, required=True, help="folder of steps.csv, env.json")
        steps.add_argument("--root", type=Path, default=Path())
        steps.set_defaults(run=_bench_steps, name=name, by=by)
    products = add_verb(
        commands, "bench-products", "time 100 matrix products on one core beside their predictions",
        "--out results/products", "fp32, numpy's OpenBLAS. Takes half a minute.",
    )  # fmt: skip
    products.add_argument("--out", type=Path, required=True, help="folder of products.csv, env.json")
    products.add_argument("--root", type=Path, default=Path())
    products.set_defaults(run=_bench_products)


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


def _bench_start(options: argparse.Namespace) -> None:
    import tempfile

    import pandas as pd

    from lowband.bench.start import read, start
    from lowband.spec.csv_tables import write_csv

    options.out.mkdir(parents=True, exist_ok=True)  # fail before a minute is spent
    starts = pd.DataFrame(start(options.root))
    with tempfile.TemporaryDirectory(dir=options.out) as folder:  # the file system that is timed
        reads = pd.DataFrame(read(Path(folder)))
    write_csv(starts, options.out / "start.csv")
    write_csv(reads, options.out / "read.csv")
    write_environment(options.out)
    print(starts.groupby("ranks")[["sharded_s", "cpu_s"]].median().to_string(float_format="%.2f"))
    print(reads.groupby("what")["bytes_per_s"].median().to_string(float_format="%.3g"))


def _bench_steps(options: argparse.Namespace) -> None:
    from importlib import import_module

    import pandas as pd

    from lowband.spec.csv_tables import write_csv

    options.out.mkdir(parents=True, exist_ok=True)  # fail before a minute is spent
    steps = pd.DataFrame(import_module(f"lowband.bench.{options.name}").bench(options.root))
    write_csv(steps, options.out / "steps.csv")
    write_environment(options.out, *steps.get("device", [])[:1])
    times = [column for column in steps.columns if column.endswith("_s")]
    print(steps.groupby(options.by)[times].median().to_string(float_format="%.3f"))


def _bench_products(options: argparse.Namespace) -> None:
    import pandas as pd

    from lowband.bench.products import bench
    from lowband.evidence.validation.products import compare, errors
    from lowband.spec.csv_tables import write_csv

    options.out.mkdir(parents=True, exist_ok=True)  # fail before a minute is spent
    timings = pd.DataFrame(bench(options.root))
    write_csv(timings, options.out / "products.csv")
    write_environment(options.out)
    print(errors(compare(timings)).to_string(index=False, float_format="%.1f"))


def write_environment(out: Path, device: str = "cpu") -> None:
    import torch

    from lowband.run.environment import describe, host
    from lowband.spec.files import write_whole

    backend = "nccl" if device == "cuda" else "gloo"
    environment = describe((host(),), torch.device(device), backend, {"source": "none"}, "loopback")
    write_whole(out / "env.json", environment.to_json())
