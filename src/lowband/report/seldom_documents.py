"""Tables in docs/low-communication.md, of predictions and of losses measured."""

from pathlib import Path

import pandas as pd

from lowband.report.writers import filled, markdown
from lowband.spec.csv_tables import read_table
from lowband.tables.build import read_sources
from lowband.tables.derived import wan

STEP_OF_GRID = 1.21  # between neighbouring rates of the published table


def published(root: Path) -> list[str]:
    """By paper and system: rows, and by how much predicted and published numbers differ."""
    table = read_table(root / "results" / "reference" / "predicted" / "low_communication.csv")
    factors = table.groupby(["arxiv", "system"], sort=False)["factor"]
    rows = factors.agg(["size", "median", "max"])
    rows["close"] = factors.apply(lambda values: (values <= STEP_OF_GRID).sum())
    cells = {
        "arXiv": "{arxiv}", "system": "{system}", "rows": "{size}", "factor, median": "{median:.3f}",
        "largest": "{max:.3f}", "within 1.21": "{close}",
    }  # fmt: skip
    return markdown(filled(rows.reset_index(), cells))


def slow_links(root: Path) -> list[str]:
    """By rate, the first to reach a loss first: step time, loss at equal tokens and at equal time."""
    table = wan.build(*read_sources("wan", root / "results" / "reference" / "wan", root))
    table = table.sort_values(["outer_link_bits_per_s", "over_first"], ascending=[False, True], kind="stable")
    table["link"] = [f"{rate / 1e6:,.0f}" for rate in table["outer_link_bits_per_s"]]
    table["late"] = [_or(value, "{:.2f}", "no 20 steps") for value in table["equal_time_loss"]]
    table["until"] = [_or(value, "{:,.0f}", "not reached") for value in table["target_s"]]
    table["over"] = [_or(value, "{:,.1f}", "-") for value in table["over_first"]]
    cells = {
        "link (Mbit/s)": "{link}", "scheme": "{scheme}", "step (s)": "{step_time_s:.3g}", "": "{provenance}",
        "computes": "{utilization:.1%}", "loss, equal tokens": "{final_loss:.3f}",
        "less hsdp's": "{difference:+.3f}", f"time to {wan.TARGET} nats (s)": "{until}",
        "over the first": "{over}", "loss, equal time": "{late}",
    }  # fmt: skip
    return markdown(filled(table, cells))


def _or(value: float, form: str, otherwise: str) -> str:
    return otherwise if pd.isna(value) else form.format(value)
