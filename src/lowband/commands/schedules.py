"""schedules, bench-schedules, bench-pipeline: pipelines predicted and measured."""

import argparse
from pathlib import Path
from typing import Any

from lowband.commands import add_verb, at_least_one, positive


def add(commands: Any) -> None:
    schedules = add_verb(
        commands, "schedules", "bubbles of pipelines' schedules at equal memory, as CSV",
        "--ranks 4 8 --micro-batches 8 32 --send 0.1 0.5",
        "Times are in forwards of one micro-batch in all of a rank's stages. Beside named schedules is the "
        "best list that a search for such sends finds (lowband.lists_for_sends). Empty: more memory than "
        "allowed. Options that take several values make a grid.",
    )  # fmt: skip
    schedules.add_argument("--ranks", nargs="+", type=at_least_one, required=True, help="along the pipeline")
    schedules.add_argument("--micro-batches", nargs="+", type=at_least_one, required=True, help="of a step")
    schedules.add_argument("--send", nargs="+", type=positive, required=True, help="to the next rank")
    schedules.add_argument("--input", type=positive, default=1.0, help="a backward's input part (default: 1)")
    schedules.add_argument("--weight", type=positive, default=1.0, help="and its weight part (default: 1)")
    schedules.add_argument(
        "--memory", type=positive, help="the most micro-batches on a rank (default: as many as ranks)"
    )
    schedules.set_defaults(run=_schedules)

    bench = add_verb(
        commands, "bench-schedules", "time pipelines' schedules on paced ranks and links",
        "--out results/schedules",
        "4 processes compute and send for stated times; each schedule's steps in turns, beside its timeline. "
        "Takes ten minutes.",
    )  # fmt: skip
    bench.add_argument("--forward", type=positive, default=0.2, help="seconds of a forward (default: 0.2)")
    bench.add_argument(
        "--send", nargs="+", type=positive, default=[0.1, 0.25, 1.0], help="over it (default: 0.1 0.25 1)"
    )
    bench.add_argument("--out", type=Path, required=True, help="folder of steps.csv, ends.csv, env.json")
    bench.set_defaults(run=_bench)

    overhead = add_verb(
        commands, "bench-pipeline", "processor time of a pipeline of one stage, and of its parts",
        "--out results/pipeline", "Bare modules, lowband.shard, lowband.Pipeline, in turns. Takes a minute.",
    )  # fmt: skip
    overhead.add_argument("--out", type=Path, required=True, help="folder of steps.csv, env.json")
    overhead.set_defaults(run=_overhead)


def _schedules(options: argparse.Namespace) -> None:
    import sys
    from itertools import product

    import pandas as pd

    from lowband.cost.player import Seconds
    from lowband.cost.slow_sends import compared

    rows = [
        {"provenance": "predicted"}
        | compared(ranks, many, Seconds(1.0, options.input, options.weight, send), options.memory)
        for ranks, many, send in product(options.ranks, options.micro_batches, options.send)
    ]
    pd.DataFrame(rows).to_csv(sys.stdout, index=False, float_format="%.6g", lineterminator="\n")


def _bench(options: argparse.Namespace) -> None:
    import pandas as pd

    from lowband.commands.benchmarks import write_environment
    from lowband.run.paced_pipelines import measure
    from lowband.spec.csv_tables import write_csv

    options.out.mkdir(parents=True, exist_ok=True)  # fail before a minute is spent
    steps, ends = (pd.DataFrame(rows) for rows in measure(options.forward, tuple(options.send)))
    write_csv(steps, options.out / "steps.csv")
    write_csv(ends, options.out / "ends.csv")
    write_environment(options.out)
    columns = ["step_s", "predicted_step_s", "bubble", "predicted_bubble", "load"]
    medians = steps.groupby(["send_over_forward", "schedule"], sort=False)[columns].median()
    print(medians.to_string(float_format="%.3f"))


def _overhead(options: argparse.Namespace) -> None:
    import pandas as pd

    from lowband.commands.benchmarks import write_environment
    from lowband.run.pipeline_overhead import overhead
    from lowband.spec.csv_tables import write_csv

    options.out.mkdir(parents=True, exist_ok=True)  # fail before a minute is spent
    steps = pd.DataFrame(overhead())
    write_csv(steps, options.out / "steps.csv")
    write_environment(options.out)
    medians = steps.groupby(["ranks", "micro_batches", "way"], sort=False)["cpu_s"].median()
    print(medians.to_string(float_format="%.4f"))
