"""The interval of a prediction, from the errors of rows that were left out of fits (validation/folds.py).

A factor f: the step takes between predicted / f and predicted x f. Of the errors |ln(predicted / published)|
of n rows left out, ln f is the k-th smallest, k = ceil(0.8 (n + 1)), as in conformal prediction (Lei et al.,
2018, doi 10.1080/01621459.2017.1307116); with fewer than 4 rows there is none.

On a machine whose runs of the stack were fitted, the rows are those of this machine and stack, left out with
their size; with their scale where there is but one size. Anywhere else a user's run is another source: the
rows are those of whole sources, each predicted without any of its rows, and every source counts alike.
"""

import math
from collections.abc import Iterable

import numpy as np
import pandas as pd

LEVEL = 0.8
RATIOS = ("ratio", "efficiency")  # quantities that say nothing of a time
MEMORY = "peak GiB"


def factor(errors: Iterable[float], level: float = LEVEL) -> float:
    """The factor from errors of rows that are alike; nan with too few of them."""
    found = sorted(errors)
    nth = math.ceil(level * (len(found) + 1) - 1e-9)
    return math.exp(found[nth - 1]) if nth <= len(found) else math.nan


def factor_elsewhere(rows: pd.DataFrame, level: float = LEVEL, by: str = "cluster") -> float:
    """The factor from rows of several machines, or sources, each with the same weight; nan without rows."""
    weights = 1 / rows.groupby(by)["row"].transform("size")
    ordered = rows.assign(weight=weights / weights.sum()).sort_values("error")
    enough = ordered["error"][ordered["weight"].cumsum() >= level - 1e-9]
    return math.exp(float(enough.iloc[0])) if len(enough) else math.nan


def rows_of_times(folds: pd.DataFrame, held_out: pd.DataFrame) -> pd.DataFrame:
    """The rows left out, with their machine, stack, unit (time or memory) and error; without ratios."""
    where = folds.drop_duplicates("source").set_index("source")[["cluster", "stack"]]
    rows = held_out[~held_out["quantity"].isin(RATIOS)].join(where, on="source")
    return rows.assign(
        unit=np.where(rows["quantity"] == MEMORY, "memory", "time"),
        error=np.abs(np.log(rows["predicted"] / rows["published"])),
    )


def left_out_whole(validation: pd.DataFrame, folds: pd.DataFrame, held_out: pd.DataFrame) -> pd.DataFrame:
    """Rows of times of whole sources, with error: left out with their machine, or never fitted on."""
    columns = ["source", "cluster", "stack", "row", "error"]
    rows = rows_of_times(folds, held_out)
    rows = rows[(rows["kind"] == "machine") & (rows["unit"] == "time")]
    never = validation.groupby("source")["use"].transform(lambda use: (use == "held out").all())
    others = validation[never & ~validation["source"].isin(rows["source"])]
    others = others[~others["quantity"].isin((*RATIOS, MEMORY))]
    error = np.abs(np.log(others["predicted"] / others["published"]))
    return pd.concat([rows[columns], others.assign(error=error)[columns]], ignore_index=True)


def by_source(validation: pd.DataFrame, folds: pd.DataFrame, held_out: pd.DataFrame) -> pd.DataFrame:
    """One row per source left out whole: the factor that the other sources give, and the percentage of its
    rows inside; and a last one, `all`: the factor of all, and the mean over sources."""
    rows, found = left_out_whole(validation, folds, held_out), []
    for source, group in rows.groupby("source", sort=False):
        given = factor_elsewhere(rows[rows["source"] != source], by="source")
        inside = 100 * float((np.exp(group["error"]) <= given).mean())
        first = group.iloc[0]
        found.append((source, first["cluster"], first["stack"], len(group), given, inside))
    columns = ["source", "cluster", "stack", "rows", "factor", "inside"]
    table = pd.DataFrame(found, columns=columns)
    whole = ("all", "", "", len(rows), factor_elsewhere(rows, by="source"), table["inside"].mean())
    table = pd.concat([table, pd.DataFrame([whole], columns=columns)], ignore_index=True)
    return table.assign(provenance="predicted")[["provenance", *columns]]


def calibrated_factors(folds: pd.DataFrame, held_out: pd.DataFrame) -> dict[tuple[str, str, str], float]:
    """(cluster, stack, unit) -> factor, where enough rows were left out."""
    rows = rows_of_times(folds, held_out)
    rows = rows[rows["kind"] != "machine"].sort_values("kind", ascending=False, kind="stable")
    rows = rows.drop_duplicates(["source", "row"])  # size comes before scale
    found = {
        (str(cluster), str(stack), str(unit)): factor(group["error"])
        for (cluster, stack, unit), group in rows.groupby(["cluster", "stack", "unit"])
    }
    return {key: value for key, value in found.items() if not math.isnan(value)}


def covered(folds: pd.DataFrame, held_out: pd.DataFrame, level: float = LEVEL) -> pd.DataFrame:
    """The rows left out, each with the interval that the other folds of its kind give it.

    A row that a machine's fold left out has the interval of other machines' folds.
    interval_factor: nan if those are too few; inside: whether the row lies in the interval
    """
    rows = rows_of_times(folds, held_out)
    parts = []
    for (_, _, unit, kind), group in rows.groupby(["cluster", "stack", "unit", "kind"], sort=False):
        if kind == "machine":
            alike = rows[(rows["kind"] == kind) & (rows["unit"] == unit)]
            others = alike[alike["cluster"] != group["cluster"].iloc[0]]
            given = pd.Series(factor_elsewhere(others, level), group.index)
        else:
            by_fold = {
                label: factor(group["error"][group["left_out"] != label], level)
                for label in group["left_out"].unique()
            }
            given = group["left_out"].map(by_fold)
        parts.append(group.assign(interval_factor=given))
    out = pd.concat(parts).sort_index().reset_index(drop=True)
    out["factor"] = np.exp(out["error"])
    out["inside"] = (out["factor"] <= out["interval_factor"]).where(out["interval_factor"].notna())
    return out.drop(columns="error")
