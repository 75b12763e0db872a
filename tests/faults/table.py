"""The campaign's table, a row for each fault."""

from pathlib import Path

from tests import campaign_rows

TABLE = "injected.csv"
COLUMNS = (
    "seed", "kind", "scheme", "ranks", "step", "victim", "detected_s", "exit_code", "printed",
    "printed_again", "resumed_from", "same_weights", "same_steps", "seconds", "wrong", "commit",
)  # fmt: skip


def read(folder: Path | None) -> list[dict[str, object]]:
    return [] if folder is None else campaign_rows.read(folder / TABLE)


def write(folder: Path | None, rows: list[dict[str, object]]) -> None:
    """All rows in the order of their seeds; nothing without a folder."""
    if folder is not None:
        ordered = sorted(rows, key=lambda row: int(str(row["seed"])))
        campaign_rows.write(folder / TABLE, COLUMNS, ordered)
