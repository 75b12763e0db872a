"""Softmax of one vector on one core: each algorithm by size, the memory's limits, and reported gains.

One row per machine, instruction set, algorithm (or pass that only moves data) and size; reported rows have
neither machine nor size.

cluster            the machine: local, or the name under which its measurements are shipped
regime             in cache: input and output fit into the last cache together; out of cache: each is at least
                   four times as large (STREAM's rule); between
n                  calls; time_s is their median, time_q20_s and time_q80_s their quantiles
bytes_per_s        traffic_bytes (what the algorithm reads and writes) over time_s
limit_s, of_limit  sum of its passes without arithmetic, measured in the same run; limit_s over time_s
over_two_pass      median over repeats of its time over two-pass's in the same repeat, and its quantiles
gain_percent       of two-pass: by how much longer the faster three-pass algorithm takes
array_bytes        size of the input; the output is as large. last_bytes: size of the last cache
"""

from typing import Any

import pandas as pd

from lowband.cost.softmax import ALGORITHMS, FP32_BYTES, PASSES, TWO_PASS, passes, traffic_bytes
from lowband.evidence.tables.derived import median_and_spread
from lowband.evidence.tables.points import EXPERIMENT
from lowband.spec.softmax import TORCH

REGIMES = ["in cache", "between", "out of cache"]
FAR = 4  # multiple of the last cache, per array
CASE = ["isa", "algorithm", "elements"]
_NAMES = [*ALGORITHMS, *PASSES, TORCH]
_REPORTED_METRIC = "speedup, maximum"
COLUMNS = [
    *EXPERIMENT, "device", "isa", "algorithm", "status", "cause", "regime", "elements", "array_bytes",
    "l1_bytes", "l2_bytes", "last_bytes", "n", "time_s", "time_q20_s", "time_q80_s", "traffic_bytes",
    "bytes_per_s", "limit_s", "of_limit", "over_two_pass", "over_two_pass_q20", "over_two_pass_q80",
    "gain_percent", "commit",
]  # fmt: skip


def build(times: pd.DataFrame, setup: pd.DataFrame, reported: pd.DataFrame) -> pd.DataFrame:
    """reported: results/reported/04_two_pass_softmax_2001.04438.csv"""
    parts = []
    for name, own in setup.groupby("cluster"):
        of_machine = (_measured(times[times["cluster"] == name], own), _not_run(own))
        parts += [part.assign(cluster=name) for part in of_machine]
    df = pd.concat([part for part in (*parts, _reported(reported)) if len(part)], ignore_index=True)
    for column in EXPERIMENT:
        if column not in df:
            df[column] = {"suite": "softmax", "compute_dtype": "fp32"}.get(column, "-")
    return df.assign(seq_len=0).reindex(columns=COLUMNS)


def _measured(times: pd.DataFrame, setup: pd.DataFrame) -> pd.DataFrame:
    if times.empty:
        return pd.DataFrame()
    by_case = times.groupby(CASE, sort=False)
    df = median_and_spread(by_case, "time_s").join(by_case.size().rename("n"))
    df = df.join(_over_two_pass(times)).reset_index()
    df = df.sort_values(["isa", "algorithm", "elements"], key=_in_order, ignore_index=True)
    known = df["algorithm"].isin([*ALGORITHMS, *PASSES])
    df["array_bytes"] = FP32_BYTES * df["elements"]
    df["traffic_bytes"] = [
        traffic_bytes(name, n) if is_known else None
        for name, n, is_known in zip(df["algorithm"], df["elements"], known, strict=True)
    ]
    df["bytes_per_s"] = df["traffic_bytes"] / df["time_s"]
    df["limit_s"] = _limits(df)
    df["of_limit"] = df["limit_s"] / df["time_s"]
    df["gain_percent"] = _gains(df)
    machine = setup.iloc[0][["device", "l1_bytes", "l2_bytes", "last_bytes", "commit"]]
    df["regime"] = [_regime(size, int(machine["last_bytes"])) for size in df["array_bytes"]]
    return df.assign(provenance="measured", status="ok", **machine)


def _in_order(values: "pd.Series[Any]") -> "pd.Series[Any]":
    return pd.Series([_NAMES.index(name) for name in values]) if values.name == "algorithm" else values


def _over_two_pass(times: pd.DataFrame) -> pd.DataFrame:
    """Per instruction set, algorithm and size: quantiles of the time over two-pass's in the same repeat."""
    two_pass = times[times["algorithm"] == TWO_PASS].set_index(["isa", "elements", "repeat"])["time_s"]
    others = times[times["algorithm"].isin(ALGORITHMS)]
    base = two_pass.reindex(pd.MultiIndex.from_frame(others[["isa", "elements", "repeat"]])).to_numpy()
    ratios = others.assign(over_two_pass=others["time_s"] / base)
    return median_and_spread(ratios.groupby(CASE), "over_two_pass")


def _limits(df: pd.DataFrame) -> list[float | None]:
    moved = df[df["algorithm"].isin(PASSES)].set_index(CASE)["time_s"]
    return [
        sum(float(moved[isa, each, n]) for each in passes(name)) if name in ALGORITHMS else None
        for isa, name, n in df[CASE].itertuples(index=False)
    ]


def _gains(df: pd.DataFrame) -> list[float | None]:
    others = df[df["algorithm"].isin(ALGORITHMS) & (df["algorithm"] != TWO_PASS)]
    faster = others.groupby(["isa", "elements"])["over_two_pass"].min()
    return [
        100 * (float(faster[isa, n]) - 1) if name == TWO_PASS else None
        for isa, name, n in df[CASE].itertuples(index=False)
    ]


def _regime(array_bytes: int, last_bytes: int) -> str:
    if array_bytes >= FAR * last_bytes:
        return "out of cache"
    return "in cache" if 2 * array_bytes <= last_bytes else "between"


def _not_run(setup: pd.DataFrame) -> pd.DataFrame:
    """Rows for instruction sets that were not run: one per algorithm and regime, with the cause."""
    missing = setup[setup["status"] != "ok"]
    columns = ["isa", "status", "cause", "device", "l1_bytes", "l2_bytes", "last_bytes", "commit"]
    rows: list[dict[Any, Any]] = [
        {**row, "algorithm": algorithm, "regime": regime, "provenance": "measured"}
        for row in missing[columns].to_dict("records")
        for algorithm in ALGORITHMS
        for regime in REGIMES
    ]
    return pd.DataFrame(rows)


def _reported(reported: pd.DataFrame) -> pd.DataFrame:
    rows = reported[reported["metric"] == _REPORTED_METRIC]
    return pd.DataFrame(
        {
            "isa": rows["isa"], "device": rows["cpu"], "gain_percent": rows["value"].astype(float),
            "provenance": "reported", "status": "ok", "cluster": "-", "algorithm": TWO_PASS,
            "regime": "out of cache",
        }
    )  # fmt: skip
