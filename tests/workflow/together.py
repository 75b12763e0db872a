"""The commands of a dry run, read from standard input, that make tables and figures: one after the other.

In processes of their own each would import pandas, and the figures seaborn: more than half of what all of
`make figures` takes. Made once is also what other tests make or nobody looks at: predictions are the shipped
ones (tests/unit/test_shipped_predictions.py makes them anew), and a figure's PDF and PNG are empty, but of
those in WHOLE. --wide makes all, by the workflow.
"""

import shlex
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd
from matplotlib.figure import Figure

from lowband.__main__ import main
from lowband.evidence.validation.tables import PREDICTED
from lowband.spec.config import Config
from lowband.spec.csv_tables import read_table

WHOLE = ("memory", "box", "reported")  # of a run's rows, of measured ones, of published ones
NOT_SHIPPED = "frontier_map"


def _shipped(name: str, config: Config) -> pd.DataFrame:
    return read_table(Path("results", "reference", "predicted", f"{name}.csv"))


def _make() -> None:
    PREDICTED.update({name: partial(_shipped, name) for name in {*PREDICTED} - {NOT_SHIPPED}})
    save = Figure.savefig

    def saved(figure: Figure, path: Path, **options: Any) -> None:
        save(figure if path.suffix == ".svg" or path.stem in WHOLE else Figure(), path, **options)

    Figure.savefig = saved  # type: ignore[method-assign, assignment]
    for line in sys.stdin:
        words = shlex.split(line.partition("Shell command: python -m lowband ")[2].partition(" > ")[0])
        if words[:1] in (["table"], ["claims"], ["figure"], ["validate"]):
            assert main(words) == 0, line


if __name__ == "__main__":
    _make()
