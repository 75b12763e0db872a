"""The table in docs/low-communication.md, from results/reference/predicted."""

from pathlib import Path

from lowband.report.writers import filled, markdown
from lowband.spec.csv_tables import read_table

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
