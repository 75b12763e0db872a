"""Tables of docs/predictor*.md, from the shipped predictions."""

from pathlib import Path
from typing import Any

import pandas as pd

from lowband.evidence.report.writers import filled, markdown
from lowband.evidence.validation import KINDS
from lowband.evidence.validation.intervals import calibrated_factors, covered
from lowband.evidence.validation.products import METHODS, compare, errors
from lowband.predict.footprint import GIB
from lowband.predict.search.plan import WIRES
from lowband.spec.csv_tables import read_table

PREDICTED = "results/reference/predicted"
COMPARED = ["zero3", "zeropp", "hier3", "planned"]  # the schemes in the planner's table


def accuracy(root: Path) -> list[str]:
    accuracy = read_table(root / PREDICTED / "accuracy.csv")
    cells = {
        "source": "{source}", "machine": "{cluster}", "stack": "{stack}", "rows are": "{use}",
        "rows": "{rows}",
        "mean error (%)": "{mean_error_percent:.1f}", "largest (%)": "{max_error_percent:.1f}",
        "constants per row": "{constants_per_row:.2g}", "on or outside bounds": "{beyond_bounds}",
    }  # fmt: skip
    return markdown(filled(accuracy, cells))


def left_out(root: Path) -> list[str]:
    """By source: the errors of all its rows, each predicted by constants fitted without its size, ..."""
    accuracy = read_table(root / PREDICTED / "accuracy.csv")
    sources = accuracy.drop_duplicates("source").copy()
    for kind in KINDS:
        mean, largest = (sources[f"{kind}_{name}_error_percent"] for name in ("mean", "max"))
        both = [f"{a:.1f} / {b:.1f}" for a, b in zip(mean, largest, strict=True)]
        sources[kind] = pd.Series(both, sources.index).where(mean.notna(), "")
    sources["all"] = sources["source"].map(accuracy.groupby("source")["rows"].sum())
    cells = {
        "source": "{source}", "machine": "{cluster}", "stack": "{stack}", "rows": "{all}",
        "constants": "{fitted_constants}", "per row": "{constants_per_row:.2g}", "without its size": "{size}",
        "without its scale": "{scale}", "without its machine": "{machine}",
        "folds not fitted": "{left_out_not_fitted}",
    }  # fmt: skip
    return markdown(filled(sources, cells))


def intervals(root: Path) -> list[str]:
    """By machine and stack: the factor of its interval, and which share of rows left out lies inside."""
    folder = root / PREDICTED
    folds, held_out = (read_table(folder / f"{name}.csv") for name in ("folds", "held_out"))
    rows = covered(folds, held_out)
    keys = ["cluster", "stack", "unit"]
    inside = rows.assign(inside=100 * rows["inside"].astype(float)).pivot_table("inside", keys, "kind")
    known = calibrated_factors(folds, held_out)
    table = inside.reindex(rows[keys].drop_duplicates().apply(tuple, axis=1)).reset_index()
    table["factor"] = [
        f"{known[key]:.3f}" if (key := tuple(row)) in known else "" for row in table[keys].to_numpy()
    ]
    for kind in KINDS:
        table[kind] = [f"{share:.0f} %" if share >= 0 else "" for share in table[kind]]
    cells = {
        "machine": "{cluster}", "stack": "{stack}", "of": "{unit}", "factor": "{factor}",
        "inside, without its size": "{size}", "without its scale": "{scale}",
        "without its machine": "{machine}",
    }  # fmt: skip
    return markdown(filled(table, cells))


def alternatives(root: Path) -> list[str]:
    return markdown(alternatives_frame(read_table(root / PREDICTED / "alternatives.csv")))


def alternatives_frame(table: pd.DataFrame) -> pd.DataFrame:
    """What can give the paper's numbers on Frontier, as text; the best first. table: `alternatives.csv`"""
    table = table.sort_values(["gives", "largest_error_percent"], ascending=[False, True], kind="stable")
    table = table.assign(yes=table["gives"].map({True: "yes", False: "no"}))
    cells = {
        "alternative": "{alternative}", "fitted": "{free}", "best values": "{values}", "place": "{place}",
        "ZeRO++ / ZeRO-3": "{ratio_zeropp_zero3:.3f}", "hier3 / ZeRO-3": "{ratio_hier3_zero3:.3f}",
        "efficiency": "{efficiency:.3f}", "gives the numbers": "{yes}", "plausibility": "{plausibility}",
    }  # fmt: skip
    return filled(table.fillna({"values": ""}), cells)


def at_scale(root: Path) -> list[str]:
    """ZeRO-3 on up to 2,240 GPUs, as published and as predicted."""
    rows = read_table(root / PREDICTED / "validation.csv")
    rows = rows[rows["source"] == "megatron-zero3"]
    named = rows["row"].str.extract(r": (?P<model>\S+) on (?P<gpus>\d+)$")
    cells = {
        "model": "{model}", "GPUs": "{gpus}", "published": "{published:g}", "predicted": "{predicted:.1f}",
        "error (%)": "{error_percent:+.1f}",
    }  # fmt: skip
    return markdown(filled(rows.join(named), cells))


def products(root: Path) -> list[str]:
    """Errors of predicted products on a processor, by kind of shape and method."""
    found = errors(compare(pd.read_csv(root / "results/reference/products/products.csv")))
    methods = {text: f"{{{name}_mean:.1f}} / {{{name}_max:.1f}}" for name, text in METHODS.items()}
    return markdown(filled(found, {"shapes": "{kind}", "number": "{shapes}", **methods}))


def beyond(root: Path) -> list[str]:
    """The fitted constants that lie on or outside their bounds."""
    constants = read_table(root / PREDICTED / "constants.csv")
    beyond = constants[constants["place"].isin(["on a bound", "outside"])]
    cells = {
        "machine": "{cluster}", "stack": "{stack}", "constant": "{constant}", "value": "{value:g}",
        "bounds": "{lower_bound:g} to {upper_bound:g}", "place": "{place}", "source": "{bounds_source}",
    }  # fmt: skip
    return markdown(filled(beyond.fillna({"stack": ""}), cells))


def pareto(root: Path) -> list[str]:
    """On each stack, fastest first: the Pareto line, and the schemes of COMPARED in both orders."""
    table = read_table(root / PREDICTED / "pareto.csv")
    rows = table[table["fits"] & (table["pareto"] | table["scheme"].isin(COMPARED))].copy()
    rows["gib"] = rows["peak_memory_bytes"] / GIB
    rows["line"] = rows["pareto"].map({True: "yes", False: ""})
    rows["wires"] = [_wires(row) for _, row in rows.iterrows()]
    rows = rows.sort_values(["stack", "tflops_per_gpu"], ascending=[True, False], kind="stable")
    cells = {
        "stack": "{stack}", "scheme": "{scheme}", "order": "{order}", "weights": "{weights}",
        "secondary": "{secondary}", "grads": "{grads}", "optim": "{optim}", "wires": "{wires}",
        "GiB": "{gib:.1f}", "TFLOPS": "{tflops_per_gpu:.1f}", "over hier3 depth": "{over_hier3_depth:.3f}",
        "Pareto": "{line}",
    }  # fmt: skip
    return markdown(filled(rows.fillna({"scheme": "", "secondary": ""}), cells))


def _wires(row: "pd.Series[Any]") -> str:
    """The wires of a row that are not native."""
    return ", ".join(f"{name} {row[name]}" for name in WIRES if row[name] != "native")
