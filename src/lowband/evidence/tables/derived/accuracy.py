"""Errors of predictions against published values, per source; calibration and held-out rows separately.

mean_error_percent, max_error_percent  of |predicted / published - 1|
fitted_constants           constants that were fitted on rows of the source
constants_per_row          the same over all of the source's rows
beyond_bounds              those of them that lie on or outside their bounds
size_, scale_, machine_... the same of all of the source's rows, each left out in a fold (validation/folds.py)
left_out_not_fitted        the folds that cannot be fitted, with the reason
"""

import pandas as pd

from lowband.evidence.tables.points import EXPERIMENT
from lowband.evidence.validation import FITTED, KINDS
from lowband.evidence.validation.tables import ROW_SEPARATOR


def build(
    validation: pd.DataFrame, constants: pd.DataFrame, folds: pd.DataFrame, held_out: pd.DataFrame
) -> pd.DataFrame:
    """One row per source and use; experiment columns that do not apply are "-"."""
    df = validation.assign(error=validation["error_percent"].abs())
    rows = df.groupby(["source", "cluster", "stack", "use"], sort=False).agg(
        rows=("row", "size"), mean_error_percent=("error", "mean"), max_error_percent=("error", "max")
    )
    out = rows.reset_index()
    fitted = _fitted(validation, constants)
    named = fitted.groupby("source")["constant"]
    out["fitted_constants"] = out["source"].map(named.size()).fillna(0).astype(int)
    out["constants_per_row"] = out["fitted_constants"] / out["source"].map(df.groupby("source").size())
    beyond = fitted[fitted["place"] != "inside"].groupby("source")["constant"].agg(", ".join)
    out["beyond_bounds"] = [beyond.get(source, "-") for source in out["source"]]
    left_out = held_out.assign(error=held_out["error_percent"].abs()).groupby(["source", "kind"])["error"]
    for kind in KINDS:
        for name, errors in (("mean", left_out.mean()), ("max", left_out.max())):
            column = f"{kind}_{name}_error_percent"
            out[column] = [errors.get((source, kind), float("nan")) for source in out["source"]]
    not_fitted = folds[folds["outcome"] != FITTED]
    why = not_fitted["kind"] + ": " + not_fitted["outcome"]
    said = why.groupby(not_fitted["source"]).agg(lambda each: ROW_SEPARATOR.join(dict.fromkeys(each)))
    out["left_out_not_fitted"] = out["source"].map(said).fillna("-")
    for column in EXPERIMENT:
        if column not in out:
            out.insert(0, column, {"provenance": "predicted", "suite": "validation"}.get(column, "-"))
    return out.assign(seq_len=0)


def _fitted(validation: pd.DataFrame, constants: pd.DataFrame) -> pd.DataFrame:
    """The fitted constants, each with the source of the rows it was fitted on."""
    sources = validation.drop_duplicates("row").set_index("row")["source"]
    fitted = constants[constants["calibrated_on"].fillna("") != ""]
    first = fitted["calibrated_on"].str.split(ROW_SEPARATOR, regex=False).str[0]
    return fitted.assign(source=first.map(sources))
