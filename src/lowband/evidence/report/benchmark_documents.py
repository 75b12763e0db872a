"""Tables in docs/benchmarks.md, from the steps and starts that `lowband bench-...` timed."""

from pathlib import Path
from typing import Any

import pandas as pd

from lowband.evidence.report.writers import filled, markdown
from lowband.evidence.tables.derived.load import build as build_load
from lowband.spec.csv_tables import read_table


def start(root: Path) -> list[str]:
    """By rank count: groups and connections in closed form, times and processor time measured."""
    rows = read_table(root / "results/reference/start/start.csv").groupby("ranks").median().reset_index()
    cells = {
        "ranks": "{ranks:.0f}", "groups of the job": "{groups_made:.0f}", "of a rank": "{groups_joined:.0f}",
        "connections of a rank": "{connections:.0f}", "groups made after (s)": "{groups_s:.2f}",
        "sharded after (s)": "{sharded_s:.2f}", "processor time of a rank (s)": "{cpu_s:.2f}",
    }  # fmt: skip
    reads = read_table(root / "results/reference/start/read.csv").groupby("what")["bytes_per_s"]
    shard, plain = (reads.get_group(what) / 1e9 for what in ("shard", "file"))
    sentence = (
        f"A checkpoint of 1 GiB is read into shards on 4 ranks at {shard.median():.2f} GB/s "
        f"({shard.min():.2f} to {shard.max():.2f}), by one plain read at {plain.median():.2f} GB/s "
        f"({plain.min():.2f} to {plain.max():.2f}); neither finds it in memory. The disk is shared with "
        "other machines."
    )
    return [*markdown(filled(rows, cells)), "", sentence]


def optimizers(root: Path) -> list[str]:
    """By ranks and optimizer: medians of a step's parts, and of the step over AdamW's in the same turn."""
    steps = read_table(root / "results/reference/optimizers/steps.csv")
    parts = ["passes_s", "exchange_s", "update_s"]
    steps["step_s"] = steps[parts].sum(axis=1)
    adamw = steps[steps["optimizer"] == "adamw"].set_index(["ranks", "step"])["step_s"]
    steps["ratio"] = (
        steps["step_s"] / adamw.loc[[*zip(steps["ranks"], steps["step"], strict=True)]].to_numpy()
    )
    by = ["ranks", "tokens_per_rank", "optimizer"]
    rows = steps.groupby(by, sort=False)[[*parts, "ratio"]].median().reset_index()
    cells = {
        "ranks": "{ranks}", "tokens per rank": "{tokens_per_rank}", "optimizer": "{optimizer}",
        "passes (s)": "{passes_s:.2f}", "exchange (s)": "{exchange_s:.2f}", "update (s)": "{update_s:.2f}",
        "step, over AdamW's": "{ratio:.2f}",
    }  # fmt: skip
    return markdown(filled(rows, cells))


def orders(root: Path) -> list[str]:
    """By number of passes: medians of a step's processor time in both orders."""
    steps = read_table(root / "results/reference/orders/steps.csv")
    times = steps.pivot_table("cpu_s", ["ranks", "passes"], "order", aggfunc="median").reset_index()
    times["ratio"] = times["breadth"] / times["depth"]
    cells = {
        "ranks": "{ranks}", "passes": "{passes}", "depth-first (s)": "{depth:.2f}",
        "breadth-first (s)": "{breadth:.2f}", "breadth / depth": "{ratio:.2f}",
    }  # fmt: skip
    return markdown(filled(times, cells))


def compiled(root: Path) -> list[str]:
    """By folder of results, ranks and engine: medians of a step with eager and with compiled blocks."""
    rows = []
    for path in sorted((root / "results/reference/compile").glob("*/steps.csv")):
        steps = read_table(path)
        by = ["device", "ranks", "engine"]
        first = steps[steps["step"] == 0].pivot_table("step_s", by, "blocks", sort=False)
        times = steps[steps["step"] > 0].pivot_table("step_s", by, "blocks", aggfunc="median", sort=False)
        times["first"] = first["compiled"]
        rows.append(times.reset_index().assign(on=path.parent.name))
    table = pd.concat(rows)
    table["ratio"] = table["compiled"] / table["eager"]
    cells = {
        "on": "{on}", "ranks": "{ranks}", "engine": "{engine}", "eager (s)": "{eager:.4f}",
        "compiled (s)": "{compiled:.4f}", "compiled / eager": "{ratio:.2f}",
        "first compiled step (s)": "{first:.1f}",
    }  # fmt: skip
    return markdown(filled(table, cells))


def joined(root: Path) -> list[str]:
    """By ranks, scheme and way: a step over the peer's in the same turn, median and middle 60 % of turns."""
    steps, rows = read_table(root / "results/reference/joined/steps.csv"), []
    for (ranks, scheme), found in steps.groupby(["ranks", "scheme"], sort=False):
        *ways, peer = found["engine"].unique()
        times = found.pivot_table(["step_s", "cpu_s"], "step", "engine")
        for way in ways:
            row: dict[str, Any] = {"ranks": ranks, "scheme": scheme, "way": way, "peer": peer}
            for column in ("step_s", "cpu_s"):
                low, middle, high = (times[column][way] / times[column][peer]).quantile([0.2, 0.5, 0.8])
                row[column] = f"{middle:.2f} ({low:.2f} to {high:.2f})"
            ours, theirs = (
                found[found["engine"] == each]["held_bytes"].iloc[0] / 1e6 for each in (way, peer)
            )
            rows.append(row | {"held": f"{ours:.0f} / {theirs:.0f}"})
    cells = {
        "ranks": "{ranks}", "scheme": "{scheme}", "ours": "{way}", "peer": "{peer}",
        "step, ours / peer": "{step_s}", "processor time, ours / peer": "{cpu_s}",
        "peak memory, ours / peer (MB)": "{held}",
    }  # fmt: skip
    return markdown(filled(pd.DataFrame(rows), cells))


def load(root: Path) -> list[str]:
    """By command and size: processor time, wall time and peak memory, beside what they may take."""
    rows = build_load(read_table(root / "results/reference/load/load.csv")).astype({"size": int})
    limits = zip(rows["limit_s"].notna(), rows["limit_s"], rows["limit_bytes"].notna(), strict=True)
    rows["limit"] = [
        " and ".join([*([f"{seconds:.0f} s"] if is_timed else []), *(["2 GiB"] if is_bounded else [])])
        for is_timed, seconds, is_bounded in limits
    ]
    rows["mib"], rows["gb"] = rows["peak_bytes"] / 2**20, rows["input_bytes"] / 1e9
    cells = {
        "command": "{part}", "runs or lines": "{size:,}", "read (GB)": "{gb:.3f}",
        "processor time (s)": "{cpu_s:.1f}", "time (s)": "{wall_s:.1f}",
        "peak memory (MiB)": "{mib:.0f}", "goal": "{limit}",
    }  # fmt: skip
    return markdown(filled(rows, cells))
