"""The interval of a prediction, from the errors of rows that were left out of fits (validation/folds.py).

A factor f: the step takes between predicted / f and predicted x f. Of the errors |ln(predicted / published)|
of n rows left out, ln f is the k-th smallest, k = ceil(0.8 (n + 1)), as in conformal prediction (Lei et al.,
2018, doi 10.1080/01621459.2017.1307116); with fewer than 4 rows there is none.

Of the rows of one source (`factor`): those of a machine and stack, left out with their size; with their scale
where there is but one size. A user's run is of another publisher, none of whose rows may be known. So no
printed interval is narrower than what sources left out whole show, each predicted without any of its rows,
and all publishers counting alike (`by_source`): sources of which others show the stack on their type of
device, for machines where its runs are known, and the other sources for anywhere else. Of each row what
counts is how far it lies from what the model admits by any host (predict/interval.py).
"""

import math
from collections.abc import Iterable

import numpy as np
import pandas as pd

from lowband.evidence.validation import CALIBRATION
from lowband.evidence.validation.published_recipes import CLUSTER, PUBLISHED_BESIDE, STACK

LEVEL = 0.8
RATIOS = ("ratio", "efficiency")  # quantities that say nothing of a time
TIMES = ("s/iteration", "ms/iteration", "step time")  # all others but memory are rates
RECIPES = ("step time", "MFU")
MEMORY = "peak GiB"


def factor(errors: Iterable[float], level: float = LEVEL) -> float:
    """The factor from errors of rows that are alike; nan with too few of them."""
    found = sorted(errors)
    nth = math.ceil(level * (len(found) + 1) - 1e-9)
    return math.exp(found[nth - 1]) if nth <= len(found) else math.nan


def factor_elsewhere(rows: pd.DataFrame, level: float = LEVEL, by: str = "cluster") -> float:
    """The factor of rows of several machines, or publishers, each with the same weight; nan without rows."""
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


def left_out_whole(
    validation: pd.DataFrame, folds: pd.DataFrame, held_out: pd.DataFrame, published_recipes: pd.DataFrame
) -> pd.DataFrame:
    """Rows of times of whole sources, with error: left out with their machine, or never fitted on.

    publisher: the reported file, of which a source is the rows of one machine
    evidence:  `known` where other sources, of another machine if the machine was left out, show the stack on
               the type of device; or `elsewhere`
    """
    devices = validation.drop_duplicates("cluster").set_index("cluster")["device"]
    rows = rows_of_times(folds, held_out)
    rows = rows[(rows["kind"] == "machine") & (rows["unit"] == "time")].join(devices, on="cluster")
    without_machine = set(rows["source"])
    never = validation.groupby("source")["use"].transform(lambda use: (use != CALIBRATION).all())
    others = validation[never & ~validation["source"].isin(without_machine)]
    others = others[~others["quantity"].isin((*RATIOS, MEMORY))]
    recipes = _of_recipes(published_recipes).join(devices, on="cluster")
    found = pd.concat([rows, others, recipes], ignore_index=True)
    shown = validation[(validation["use"] == CALIBRATION) & (validation["quantity"] != MEMORY)]
    evidence = {}
    for source, of in found.groupby("source"):
        alike = shown[(shown["stack"] == of["stack"].iloc[0]) & (shown["device"] == of["device"].iloc[0])]
        if source in without_machine:
            alike = alike[alike["cluster"] != of["cluster"].iloc[0]]
        evidence[source] = "known" if len(alike) else "elsewhere"
    files = validation.drop_duplicates("source").set_index("source")["reported_in"]
    publisher = (
        found["source"].map(files).fillna(found["source"].map(PUBLISHED_BESIDE)).fillna(found["source"])
    )
    return found.assign(error=beyond(found), evidence=found["source"].map(evidence), publisher=publisher)


def _of_recipes(published: pd.DataFrame) -> pd.DataFrame:
    """Steps and shares of the peak of recipes that say all that a prediction takes."""
    found = published[published["quantity"].isin(RECIPES) & (published["use"] == "as it is")]
    source = found["source"].str.replace(r"https://github.com/(\S+) .*", r"\1", regex=True)  # a repository
    return found.assign(cluster=CLUSTER, stack=STACK, source=source, row=found["setting"])


def beyond(rows: pd.DataFrame) -> pd.Series:
    """How far each row lies from its prediction, or from all that any host admits: |ln|, 0 inside."""
    is_time = rows["quantity"].isin(TIMES)
    longer, by_host = (
        np.log(rows["published"] / predicted) * np.where(is_time, 1, -1)
        for predicted in (rows["predicted"], rows["slow_host"].fillna(rows["predicted"]))
    )
    found: pd.Series = np.maximum(np.maximum(-longer, by_host), 0)
    return found


def by_source(
    validation: pd.DataFrame, folds: pd.DataFrame, held_out: pd.DataFrame, published_recipes: pd.DataFrame
) -> pd.DataFrame:
    """One row per source left out whole: the factor that other publishers' sources of the same evidence give,
    and the percentage of its rows inside. Then means over sources, with the factor of all of an evidence, and
    the percentage of all rows."""
    rows = left_out_whole(validation, folds, held_out, published_recipes).sort_values(
        "evidence", kind="stable"
    )
    factors, of_others = {}, {}
    for evidence, alike in rows.groupby("evidence"):
        factors[evidence] = factor_elsewhere(alike, by="publisher")
        for (source, publisher), _ in alike.groupby(["source", "publisher"]):
            of_others[source] = factor_elsewhere(alike[alike["publisher"] != publisher], by="publisher")
    factor = rows["source"].map(of_others)
    rows = rows.assign(factor=factor, inside=100.0 * (np.exp(rows["error"]) <= factor))
    shown = {"cluster": "first", "stack": "first", "evidence": "first", "row": "size", "factor": "first"}
    table = rows.groupby("source", sort=False).agg({**shown, "inside": "mean"}).reset_index()
    table = table.rename(columns={"row": "rows"})
    means = table.groupby("evidence", sort=False).agg({"rows": "sum", "inside": "mean"}).reset_index()
    means = means.assign(source="mean of sources", factor=means["evidence"].map(factors))
    whole = pd.DataFrame({
        "source": ["mean of sources", "all rows"], "rows": len(rows),
        "inside": [table["inside"].mean(), rows["inside"].mean()],
    })  # fmt: skip
    table = pd.concat([table, means, whole], ignore_index=True)
    return table.fillna({"cluster": "", "stack": "", "evidence": ""}).assign(provenance="predicted")


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
