"""A reproduction on a terminal: the claims graded on its own runs, then tallies of the others."""

from pathlib import Path
from typing import Any

import pandas as pd

from lowband.evidence.claims.origin import COMPUTED, HERE, SHIPPED
from lowband.evidence.report.claim_views import (
    by_kind,
    by_origin,
    ended,
    must_be,
    ours,
    read_graded,
    reported,
    tally,
)
from lowband.evidence.tables.build import read_source
from lowband.spec.benchmarks import RULES
from lowband.spec.columns import aligned
from lowband.spec.csv_tables import read_table

WIDTH = 100  # columns of the screen

_ABOUT = {
    HERE: "This run",
    SHIPPED: "Shipped results, which this run did not measure",
    COMPUTED: "Predictions, about this artifact itself and the same on every machine",
}


def summary(claims_csv: Path, tables_dir: Path, figures_dir: Path | None, root: Path = Path()) -> str:
    """The claims that this run graded, line by line; the number of the others, unless nothing was run.

    figures_dir: None if nothing was drawn; else the last line names the page, which is made from the figures
    root: the folder that holds results/
    """
    claims = read_graded(claims_csv)
    runs = read_table(tables_dir / "runs.csv")
    groups = by_origin(claims)
    lines = [
        f"{len(runs)} runs: {ended(runs)}"
        if HERE in groups or SHIPPED not in groups
        else f"Nothing was run. {len(runs)} shipped runs: {ended(runs)}",
        *[f"  {run['run_id']}: {run['status']}, {run['cause']}"[:WIDTH] for run in _failed(runs)],
        *[f"  links of suite {suite}: {links}"[:WIDTH] for suite, links in _box_links(runs)],
        *_other_processors(tables_dir, root),
        "",
    ]
    for name, group in groups.items():
        lines.append(f"{_ABOUT[name]}: {tally(group)}")
        if name == HERE or HERE not in groups:
            lines += ["", f"  {'':9}{'claim':37}{'reported':>9}{'ours':>11}  must be"]
            lines += ["  " + _claim_line(claim) for _, claim in group.iterrows()] + [""]
    kinds = by_kind(claims).drop(columns=["graded", COMPUTED], errors="ignore")
    drawn = []
    if figures_dir is not None:
        drawn = [f"Figures:         {figures_dir}", f"Page:            {tables_dir.parent / 'page.html'}"]
    return "\n".join(
        [
            *lines,
            f"Not run: {int((claims['verdict'] == 'not run').sum())} of {len(claims)} claims "
            "(why: column `why` of claims.csv)",
            "",
            *aligned([list(kinds.columns), *kinds.to_numpy().tolist()]),
            "",
            f"Claims in full:  {claims_csv}",
            f"Tables:          {tables_dir}",
            *drawn,
        ]
    )


def _box_links(runs: pd.DataFrame) -> list[tuple[str, str]]:
    """Whether the links of the scale model's suites were shaped, and if not, why not."""
    boxes = runs.loc[runs["scale"] > 1, ["suite", "links"]].dropna().drop_duplicates()
    return [(str(suite), str(links)) for suite, links in boxes.to_numpy()]


def _other_processors(tables_dir: Path, root: Path) -> list[str]:
    """A line for each benchmark that this reproduction ran on a processor of which no result is shipped."""
    lines = []
    for name, rule in RULES.items():
        if not (tables_dir / f"{rule.setup}.csv").is_file():
            continue
        here = set(read_source(rule.setup, tables_dir, root)["device"])
        folder = root / "results" / "reference" / name
        shipped = set(read_source(rule.setup, folder, root)["device"])
        if here - shipped:
            lines.append(
                f"  {name} was measured on {', '.join(sorted(here))}; shipped numbers, and README's, are of "
                f"{' and '.join(sorted(shipped))}"
            )
    return lines


def _failed(runs: pd.DataFrame) -> list[dict[str, Any]]:
    """The first few runs that did not end ok; runs.csv has all of them."""
    failed = runs[runs["status"] != "ok"].fillna({"cause": ""})
    return [{str(key): value for key, value in row.items()} for row in failed[:5].to_dict("records")]


def _claim_line(claim: "pd.Series[Any]") -> str:
    return (
        f"{claim['verdict']:9}{claim['short']:37}{reported(claim) or '-':>9}{ours(claim):>11}  "
        f"{must_be(claim)}"
    )
