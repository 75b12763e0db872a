"""A layer's forward with tokens in parts that take turns (`bench-routes`), beside what is predicted.

alone_s:     with experts that take no time; took_s: with experts that take compute_s on the fullest rank;
             medians over repeats
predicted_s: by cost.experts.in_turns_s, from a line through alone_s over parts: a start-up of each, the rest
gain:        took_s in one part over that in these
best_gain:   the gain of the number of parts that is predicted to be the fastest
over_best:   its took_s over that of the fastest
"""

import numpy as np
import pandas as pd

from lowband.cost.experts import AHEAD, in_turns_s

TOP_K = 4  # of these rows alone
GROUP = ["cluster", "ranks", "route"]
COLUMNS = (
    "provenance", *GROUP, "parts", "alone_s", "compute_s", "took_s", "predicted_s", "gain", "best_gain",
    "over_best",
)  # fmt: skip


def build(routes: pd.DataFrame) -> pd.DataFrame:
    """One row per route and number of parts."""
    found: list[dict[str, object]] = []
    for group, rows in routes[routes["top_k"] == TOP_K].groupby(GROUP, sort=False):
        is_alone = rows["compute_s"] == 0
        alone = _by_parts(rows[is_alone], "took_s")
        took, compute = (_by_parts(rows[~is_alone], name) for name in ("took_s", "compute_s"))
        if len(alone) < 2 or [*alone] != [*took]:
            continue
        start_s, rest_s = np.polyfit([*alone], [*alone.values()], 1)
        one_way = {parts: (rest_s + parts * start_s) / 2 for parts in alone}
        predicted = {n: in_turns_s(n, one_way[n], compute[n], one_way[n], AHEAD) for n in alone}
        named = min(predicted, key=lambda parts: float(predicted[parts]))
        of_named = took[min(took)] / took[named], took[named] / min(took.values())
        for n in alone:
            times = alone[n], compute[n], took[n], predicted[n], took[min(took)] / took[n]
            values = ("measured", *group, n, *times, *of_named)
            found.append(dict(zip(COLUMNS, values, strict=True)))
    return pd.DataFrame(found, columns=[*COLUMNS])


def _by_parts(rows: pd.DataFrame, column: str) -> dict[int, float]:
    medians = rows.groupby("parts")[column].median()
    return dict(zip(medians.index.tolist(), medians.tolist(), strict=True))
