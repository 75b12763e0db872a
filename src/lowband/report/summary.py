"""One screen of a reproduction: how its runs ended, which claims hold, where tables and figures lie."""

from pathlib import Path
from typing import Any

import pandas as pd

from lowband.report.claim_views import VERDICTS, must_be, ours, read_graded
from lowband.report.files import read_table

WIDTH = 100  # columns of the screen


def summary(claims_csv: Path, tables_dir: Path, figures_dir: Path) -> str:
    """The claims that were tried, line by line; of the others only how many."""
    claims = read_graded(claims_csv)
    runs = read_table(tables_dir / "runs.csv")
    verdicts = claims["verdict"].value_counts()
    ended = ", ".join(f"{count} {status}" for status, count in runs["status"].value_counts().items())
    counts = ", ".join(f"{verdicts.get(verdict, 0)} {verdict}" for verdict in VERDICTS)
    return "\n".join(
        [
            f"{len(runs)} runs: {ended}",
            *[f"  {run['run_id']}: {run['status']}, {run['cause']}"[:WIDTH] for run in _failed(runs)],
            *[f"  links of suite {suite}: {links}"[:WIDTH] for suite, links in _box_links(runs)],
            f"{len(claims)} claims: {counts} (why: column `why` of claims.csv)",
            "",
            f"{'':9}{'claim':37}{'reported':>13}{'ours':>11}  must be",
            *[_claim_line(claim) for _, claim in claims[claims["verdict"] != "not run"].iterrows()],
            "",
            f"Claims in full:  {claims_csv}",
            f"Tables:          {tables_dir}",
            f"Figures:         {figures_dir}",
        ]
    )


def _box_links(runs: pd.DataFrame) -> list[tuple[str, str]]:
    """Whether the links of the scale model's suites were shaped, and if not why."""
    boxes = runs.loc[runs["scale"] > 1, ["suite", "links"]].dropna().drop_duplicates()
    return [(str(suite), str(links)) for suite, links in boxes.to_numpy()]


def _failed(runs: pd.DataFrame) -> list[dict[str, Any]]:
    """The first few runs that did not end ok; runs.csv has all of them."""
    failed = runs[runs["status"] != "ok"].fillna({"cause": ""})
    return [{str(key): value for key, value in row.items()} for row in failed[:5].to_dict("records")]


def _claim_line(claim: "pd.Series[Any]") -> str:
    reported = "-" if pd.isna(claim["reported"]) else str(claim["reported"])
    return f"{claim['verdict']:9}{claim['short']:37}{reported:>13}{ours(claim):>11}  {must_be(claim)}"
