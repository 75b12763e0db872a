"""bench-softmax: Two-Pass Softmax on this processor, measured as in its paper."""

import argparse
from pathlib import Path
from typing import Any

TIMES, SETUP, ENVIRONMENT = "softmax_times.csv", "softmax_setup.csv", "softmax_env.json"


def add(commands: Any) -> None:
    bench = commands.add_parser(
        "bench-softmax", help="time three softmax algorithms over vector sizes, on one core (a minute)"
    )
    bench.add_argument("--out", type=Path, required=True, help=f"folder of {TIMES}, {SETUP}, {ENVIRONMENT}")
    bench.set_defaults(run=_bench)


def _bench(options: argparse.Namespace) -> None:
    import json

    import pandas as pd

    from lowband.bench.softmax import measure
    from lowband.spec.csv_tables import write_csv
    from lowband.spec.files import write_whole
    from lowband.spec.softmax import Setup, Time

    options.out.mkdir(parents=True, exist_ok=True)  # fail before a minute is spent
    times, setups, environment = measure()
    write_csv(pd.DataFrame(times, columns=Time._fields), options.out / TIMES)
    write_csv(pd.DataFrame(setups, columns=Setup._fields), options.out / SETUP)
    write_whole(options.out / ENVIRONMENT, json.dumps(environment, indent=2) + "\n")
    for row in setups:
        print(f"{row.isa}: {row.status} {row.cause}".rstrip())
