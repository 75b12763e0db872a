"""bench-softmax, ...: benchmarks of this machine, one for each entry of spec/benchmarks.py."""

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lowband.commands import add_verb, at_least_one, function_of, positive, root, write_environment
from lowband.spec.benchmarks import BENCHMARKS, GPU_MODELS, Benchmark, Measured, Part

OPTIONS: dict[str, dict[str, Any]] = {
    "root": {"type": root, "default": Path()},
    "model": {"help": f"on a GPU one of {', '.join(GPU_MODELS)} (default: the first)"},
    "forward": {"type": positive, "default": 0.2, "help": "seconds of a forward (default: 0.2)"},
    "steps": {"type": at_least_one, "default": 400, "help": "of each model (default: 400)"},
    "send": {
        "type": positive, "default": [0.1, 0.25, 1.0], "nargs": "+", "help": "over it (default: 0.1 0.25 1)",
    },
}  # fmt: skip


def add(commands: Any) -> None:
    for name, benchmark in BENCHMARKS.items():
        environment = "env.json" if benchmark.rule is None else f"{name}_env.json"
        files = ", ".join([*(f"{table}.csv" for table in benchmark.tables), environment])
        bench = add_verb(
            commands, _bench, f"bench-{name}", benchmark.help, f"--out results/{name}", benchmark.more
        )
        bench.add_argument("--out", type=Path, required=True, help=f"folder of {files}")
        for option in benchmark.takes:
            bench.add_argument(f"--{option}", **OPTIONS[option])
        bench.set_defaults(name=name)


def _bench(options: argparse.Namespace) -> None:
    import json
    import tempfile

    import pandas as pd

    from lowband.spec.csv_tables import write_csv
    from lowband.spec.files import write_whole

    benchmark, frames = BENCHMARKS[options.name], dict[str, pd.DataFrame]()
    options.out.mkdir(parents=True, exist_ok=True)  # fail before a minute is spent
    with tempfile.TemporaryDirectory(dir=options.out) as folder:
        given = vars(options) | {"folder": Path(folder)}
        for part in benchmark.parts:
            found = function_of(part.by)(*(given[name] for name in part.takes))
            frames |= _frames(benchmark, part, found)
    for table, frame in frames.items():
        write_csv(frame, options.out / f"{table}.csv")
    if isinstance(found, Measured):
        text = json.dumps(found.environment, indent=2) + "\n"
        write_whole(options.out / f"{options.name}_env.json", text)
        print("\n".join(found.lines))
        return
    write_environment(options.out, *frames[benchmark.tables[0]].get("device", [])[:1])
    print("\n".join(_summary(benchmark, frames)))


def _frames(benchmark: Benchmark, part: Part, found: Any) -> dict[str, Any]:
    """The part's tables. found: what its function returned"""
    import pandas as pd

    if isinstance(found, Measured):
        rows = found.tables
    else:
        rows = dict(zip(part.tables, (found,) if isinstance(found, list) else found, strict=True))
    kinds = {} if benchmark.rule is None else benchmark.rule.rows
    return {
        table: pd.DataFrame(rows[table], columns=getattr(kinds.get(table), "_fields", None))
        for table in part.tables
    }


def _summary(benchmark: Benchmark, frames: dict[str, Any]) -> Iterator[str]:
    for table, shown in benchmark.shows.items():
        frame = frames[table]
        of = list(shown.of) or [column for column in frame if column.endswith("_s")]
        yield frame.groupby(list(shown.by), sort=False)[of].median().to_string(float_format=shown.digits)
    if benchmark.summary:
        yield function_of(benchmark.summary)(frames[benchmark.tables[0]])
