"""The campaign's table, a row for each fault."""

from pathlib import Path

from tests.campaign_rows import Rows

COLUMNS = (
    "seed", "kind", "scheme", "ranks", "step", "victim", "detected_s", "exit_code", "printed",
    "printed_again", "resumed_from", "same_weights", "same_steps", "seconds", "wrong", "commit",
)  # fmt: skip


def rows_of(folder: Path | None) -> Rows:
    return Rows(folder and folder / "injected.csv", COLUMNS)
