"""Ways along context in a box: of each cell, the way predicted to be the fastest beside the one that was.

A cell is what its runs share but for how ranks attend. step_s: of the predicted way, median over repeats;
is_right: whether the two ways are one; next_predicted, next_measured: the fastest of the others' steps over
the predicted way's, so measured it is below 1 where another way was faster. right: cells of the suite whose
ways are one.
"""

import pandas as pd

SUITES = ["box-context", "box-context-levels"]
CELL = [
    "provenance", "suite", "cluster", "model", "ranks", "seq_len", "micro_batch", "recompute",
    "outer_link_bytes_per_s", "scale",
]  # fmt: skip
WAY = ["context_attention", "context_states"]
COLUMNS = (
    "ways", "predicted_way", "measured_way", "is_right", "next_predicted", "next_measured", "step_s",
    "predicted_step_s",
)  # fmt: skip


def build(runs: pd.DataFrame) -> pd.DataFrame:
    """One row per cell of which all ways ended ok."""
    of_suite = runs[runs["suite"].isin(SUITES)]
    rows = []
    for cell, found in of_suite.groupby(CELL, sort=False, dropna=False):
        if (found["status"] != "ok").any():
            continue
        ways = found.groupby(WAY, sort=False)[["step_time_s", "predicted_step_time_s"]].median()
        predicted, measured = (ways[column].sort_values() for column in ways.columns[::-1])
        named = predicted.index[0]
        rows.append(
            {
                **dict(zip(CELL, cell, strict=True)), "ways": len(ways),
                "predicted_way": _words(*named), "measured_way": _words(*measured.index[0]),
                "is_right": named == measured.index[0],
                "next_predicted": predicted.iloc[1] / predicted.iloc[0],
                "next_measured": measured.drop(named).iloc[0] / measured[named],
                "step_s": measured[named], "predicted_step_s": predicted.iloc[0],
            }
        )  # fmt: skip
    found = pd.DataFrame(rows, columns=[*CELL, *COLUMNS])
    return found.assign(right=found.groupby("suite")["is_right"].transform("sum"))


def _words(attention: str, states: str) -> str:
    if states == "auto":
        return attention
    return f"state by {states}" if attention == "state" else f"{attention}, state by {states}"
