"""The columns that identify a table's points, and those by which points are compared. The only home of both.

A point is a run without its repeat: two runs that differ in any option are two points. Every option of a run
is a column of runs.csv, so that a table can compare the points that are equal in all but some options.
"""

import hashlib
import json
from typing import Any

import pandas as pd

from lowband.spec.axes import shown
from lowband.spec.run import OPTIONS, RunSpec
from lowband.spec.yaml_model import Strict

# Columns that identify an experiment: its points are compared with each other, in one panel of a figure.
EXPERIMENT = [
    "provenance", "suite", "cluster", "engine", "model", "seq_len", "compute_dtype", "condition",
]  # fmt: skip
# A point and the columns by which a reader knows it. All of these are functions of the point.
POINT = ["point", *EXPERIMENT, "global_batch", "scheme", "ranks"]

NO_CONDITION = "-"  # for a run whose suite's axes all have their own columns

_SUM_DIGITS = 12
# Options renamed in runs.csv, where their name is taken by a result of the run or a value of the repeat.
_RENAMED = {"steps": "asked_steps", "device": "asked_device", "seed": "first_seed"}


def _column(option: str) -> str:
    """The option's column of runs.csv; for a definition (machine, model, scheme) its checksum's."""
    kind = RunSpec.model_fields[option].annotation
    if isinstance(kind, type) and issubclass(kind, Strict):
        return f"{option}_sum"
    return _RENAMED.get(option, option)


COLUMNS = {option: _column(option) for option in OPTIONS}


def at_most_ranks(rows: pd.DataFrame) -> pd.DataFrame:
    """The rows of each experiment's largest number of ranks."""
    return rows[rows["ranks"] == rows.groupby(EXPERIMENT)["ranks"].transform("max")]


def identity(spec: RunSpec) -> dict[str, Any]:
    """`point`, the checksum of all options of a run, and each option in its column."""
    options = spec.point
    all_values = {**options, **{key: getattr(spec, key) for key in OPTIONS if key not in options}}
    values = {
        COLUMNS[key]: _sum(value) if isinstance(value, dict) else shown(value)
        for key, value in all_values.items()
    }
    return {"point": _sum(options), **values}


def _sum(definition: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(definition, sort_keys=True).encode()).hexdigest()[:_SUM_DIGITS]


def same_but(df: pd.DataFrame, *options: str) -> list[str]:
    """Columns in which rows agree if their runs differ only in these options and in repeats.

    An option that `df` lacks did not exist when its runs were made: all had the default. Options may have no
    value: group with dropna=False.
    """
    assert set(options) <= set(COLUMNS), options
    return [column for option, column in COLUMNS.items() if option not in options and column in df]


def points(runs: pd.DataFrame) -> pd.DataFrame:
    """One row per point, in the order of the runs, with POINT and every option; index: point."""
    columns = dict.fromkeys([*POINT, *same_but(runs)])
    return runs.drop_duplicates("point")[list(columns)].set_index("point", drop=False).rename_axis(None)


def with_options(rows: pd.DataFrame, runs: pd.DataFrame) -> pd.DataFrame:
    """`rows` with every option of their runs added."""
    options = [column for column in same_but(runs) if column not in rows]
    return rows.merge(runs[["run_id", *options]], on="run_id", how="left")


def beside(
    df: pd.DataFrame, others: pd.DataFrame, *options: str, on: tuple[str, ...] = (), **columns: str
) -> pd.DataFrame:
    """`df` with columns (new name = old name) of the row of `others` that differs only in `options`.

    Empty if there are none or several, as with two schemes of one name. on: further columns that must agree
    """
    keys = [*same_but(df, *options), *on]
    found = others[[*keys, *columns.values()]].drop_duplicates(keys, keep=False)
    return df.merge(found.rename(columns={old: new for new, old in columns.items()}), on=keys, how="left")


def over(df: pd.DataFrame, rate: str, **chosen: str) -> pd.DataFrame:
    """`df` with over_<values>: `rate` over that of the point that differs only in having these values.

    chosen: option -> value
    """
    name = "_".join(("over", *chosen.values()))
    if not set(chosen) <= set(df):  # an option is younger than these runs
        return df.assign(**{name: float("nan")})
    is_chosen = (df[list(chosen)] == pd.Series(chosen)).all(axis=1)
    df = beside(df, df[is_chosen], *chosen, other_rate=rate)
    df[name] = df[rate] / df.pop("other_rate")
    return df


def with_base(df: pd.DataFrame, rate: str) -> pd.DataFrame:
    """The points with `base_ranks` and `base_rate`: the fewest ranks on which `rate` was measured.

    The points compared differ only in ranks, and share the batch that their suite keeps constant: per rank
    (weak scaling) or over all ranks (strong scaling).
    """
    kept = df["micro_batch"].where(df["scaling"] == "weak", df["global_batch"])
    df = df.assign(kept_batch=kept)
    series = [*same_but(df, "ranks", "micro_batch"), "kept_batch"]
    measured = df[df[rate].notna()].sort_values("ranks", kind="stable")
    base = measured.drop_duplicates(series)[[*series, "ranks", rate]]
    base = base.rename(columns={"ranks": "base_ranks", rate: "base_rate"})
    return df.merge(base, on=series, how="left").drop(columns="kept_batch")


def all_of(values: pd.Series) -> str:
    """The texts of a point's runs, each once: repeats may have had other links."""
    return " + ".join(dict.fromkeys(values.dropna().map(str)))
