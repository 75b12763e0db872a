"""Load of ranks along context under a causal mask (cost/context_load.py), beside what was published.

Without zigzag the last of n ranks has most pairs of a query and a key, and the others wait for it.
ring-flash-attention prints how often per second 8 GPUs attend to a sequence of 8 x 8K tokens, and as the
ideal an eighth of the rate at which one attends to 8K, because each of the 8 has 8 times the work. The ratio
of the two is the mean rank's share of the pairs that the one with most has, and less where sends are not
hidden. The varlen rows pack sequences, each of which is cut over all ranks, so their balance is the same. No
constant is fitted.
"""

import pandas as pd

from lowband.cost.context_load import attended
from lowband.evidence.validation import reported
from lowband.spec.config import Config
from lowband.spec.context import Layout
from lowband.spec.mesh import WORLD, Levels

REPORTED = "12_context.csv"
SYSTEMS = {"ring": False, "zigzag ring": True}  # name in the table -> with zigzag


def context_balance(config: Config) -> pd.DataFrame:
    """A row per printed rate. published: its percentage of the ideal; predicted: of pairs; off: in points."""
    rows = []
    for row in reported(config, REPORTED).itertuples():
        ranks = int(row.ranks)
        layout = Layout(Levels.fit({}, ranks), {WORLD: "ring"}, SYSTEMS[row.system])
        predicted = 100 * float(1 / sum(attended(layout)))
        published = 100 * float(row.value) / float(row.ideal)
        rows.append(
            {
                "provenance": "predicted",
                "source": row.paper.split(", ")[1],
                "system": row.system,
                "hardware": row.hardware,
                "api": row.api,
                "passes": row.passes,
                "ranks": ranks,
                "published": published,
                "predicted": predicted,
                "off": predicted - published,
            }
        )
    return pd.DataFrame(rows)
