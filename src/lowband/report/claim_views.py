"""Graded claims for a reader: Markdown and HTML of the same cells (report/claim_latex.py has LaTeX).

First the number that hold, by paper and by kind; then the claims that were tried, on this run's results and
on shipped ones; then those that were not tried, with the reason.
"""

import html
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from lowband.errors import UserError
from lowband.report.claims import KINDS, PAPERS
from lowband.report.origin import ORIGINS
from lowband.spec.csv_tables import read_table

VERDICTS = ("pass", "short", "partial", "fit", "not run")
TRIED = ("verdict", "claim", "about", "kind", "reported", "ours", "must be", "rows from", "note")
HEADLINES = ("verdict", "claim", "reported", "ours", "must be")
NOT_RUN = ("claim", "about", "reported", "why not run")

Rows = list[list[str]]


def read_graded(path: Path) -> pd.DataFrame:
    """Read a claims.csv. Raises UserError for another table."""
    claims = read_table(path)
    if not {"verdict", "experiment", "origin"} <= set(claims):
        raise UserError("no graded claims", where=path, allowed="a claims.csv that `lowband claims` wrote")
    return claims


def is_tried(claims: pd.DataFrame) -> "pd.Series[bool]":
    return claims["verdict"] != "not run"


def ours(claim: "pd.Series[Any]") -> str:
    """Our value, to four digits."""
    return "" if pd.isna(claim["ours"]) else f"{claim['ours']:.4g}"


def reported(claim: "pd.Series[Any]") -> str:
    """The paper's value in the unit of ours; as printed if the claim was not tried."""
    if pd.notna(claim["reported"]):
        return f"{claim['reported']:.4g}"
    if claim["verdict"] != "not run" or pd.isna(claim["printed"]):
        return ""
    return " ".join(str(claim[column]) for column in ("printed", "printed_unit") if pd.notna(claim[column]))


def must_be(claim: "pd.Series[Any]") -> str:
    """The relation that must hold, with its tolerance and the unit of reported, ours and target."""
    if pd.isna(claim["target"]):
        return ""
    slack = f" +- {claim['tolerance']:g}" if claim["tolerance"] else ""
    unit = "" if pd.isna(claim["unit"]) else f" {claim['unit']}"
    return f"{claim['relation']} {claim['target']:g}{slack}{unit}"


def minutes(value: float) -> str:
    """Minutes of a machine or a reader, rounded up for planning; empty if there is none."""
    return "" if pd.isna(value) else f"{max(1, round(value))}"


def rows_from(claim: "pd.Series[Any]") -> str:
    """Whether this run measured the rows or they are shipped, with machine, date, commit and experiment."""
    machine = "" if pd.isna(claim["rows_from"]) else f": {claim['rows_from']}"
    return f"{claim['origin']}{machine}; {claim['provenance']}, experiment {claim['experiment']}"


def note(claim: "pd.Series[Any]") -> str:
    """Details behind a verdict: each value if a few were aggregated, and why it is not a pass."""
    each = "" if pd.isna(claim["values"]) else f"each: {claim['values']}"
    return "; ".join(filter(None, (each, "" if pd.isna(claim["why"]) else str(claim["why"]))))


def tried(claims: pd.DataFrame) -> Rows:
    """The cells under TRIED."""
    return [
        [
            row["verdict"], row["short"], row["paper_element"], row["kind"], reported(row), ours(row),
            must_be(row), rows_from(row), note(row),
        ]
        for _, row in claims[is_tried(claims)].iterrows()
    ]  # fmt: skip


def not_run(claims: pd.DataFrame) -> Rows:
    """The cells under NOT_RUN."""
    rows = claims[~is_tried(claims)]
    return [[row["short"], row["paper_element"], reported(row), row["why"]] for _, row in rows.iterrows()]


def tally(claims: pd.DataFrame) -> str:
    """The number of claims of each verdict, as one phrase; verdicts without claims are left out."""
    counts = claims["verdict"].value_counts()
    return ", ".join(f"{counts[verdict]} {verdict}" for verdict in VERDICTS if verdict in counts) or "none"


def by_origin(claims: pd.DataFrame) -> dict[str, pd.DataFrame]:
    """The claims that were tried, by the origin of their rows; this run's come first."""
    groups = {name: claims[is_tried(claims) & (claims["origin"] == name)] for name in ORIGINS}
    return {name: group for name, group in groups.items() if len(group)}


def tally_apart(claims: pd.DataFrame) -> str:
    """Separate tallies of the claims tried on this run's results and of the rest."""
    parts = [f"{name}: {tally(group)}" for name, group in by_origin(claims).items()]
    return "; ".join([*parts, f"not run: {int((~is_tried(claims)).sum())}"])


def headlines(claims: pd.DataFrame, names: Mapping[str, str]) -> Rows:
    """The cells under HEADLINES. names: a claim's id -> the words to show it under."""
    return [
        [row["verdict"], name, reported(row), ours(row), must_be(row)]
        for claim, name in names.items()
        for _, row in claims[claims["id"] == claim].iterrows()
    ]


def by_paper(claims: pd.DataFrame) -> tuple[list[str], Rows]:
    """Columns and cells: verdicts of each paper's claims, and of those about the artifact itself."""
    named = {about: claims[claims["paper"] == paper] for paper, about in PAPERS.items()}
    return _standing("paper", {**named, KINDS["artifact"]: claims[claims["paper"].isna()]})


def by_kind(claims: pd.DataFrame) -> tuple[list[str], Rows]:
    """Columns and cells: verdicts of relations, absolute numbers and claims about the artifact itself."""
    return _standing("kind", {about: claims[claims["kind"] == kind] for kind, about in KINDS.items()})


def _standing(first: str, groups: dict[str, pd.DataFrame]) -> tuple[list[str], Rows]:
    """Columns and cells of verdicts per group, with a column for each origin that occurs."""
    origins = list(by_origin(pd.concat(groups.values())))
    rows = []
    for about, claims in groups.items():
        apart, graded = by_origin(claims), int(is_tried(claims).sum())
        cells = [tally(apart[name]) if name in apart else "-" for name in origins]
        rows.append([about, str(len(claims)), str(graded), *cells, str(len(claims) - graded)])
    return [first, "claims", "graded", *origins, "not possible here"], rows


def markdown_table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """A Markdown table, as lines."""
    lines = [columns, ["---"] * len(columns), *rows]
    return ["| " + " | ".join(str(cell).replace("|", "\\|") for cell in cells) + " |" for cells in lines]


def markdown_standing(claims: pd.DataFrame) -> list[str]:
    """How many claims hold: by paper, then by kind."""
    return [*markdown_table(*by_paper(claims)), "", *markdown_table(*by_kind(claims))]


def markdown(claims: pd.DataFrame) -> list[str]:
    """The number of claims that hold, then every claim; those not run are folded."""
    lines = [*markdown_standing(claims), ""]
    for name, group in by_origin(claims).items():
        lines += [f"**{_heading(name, group)}**", "", *markdown_table(TRIED, tried(group)), ""]
    return [
        *lines,
        "<details><summary>Not run, and why</summary>",
        "",
        *markdown_table(NOT_RUN, not_run(claims)),
        "",
        "</details>",
    ]


def _heading(name: str, claims: pd.DataFrame) -> str:
    return f"{name[0].upper()}{name[1:]}, {len(claims)} claims: {tally(claims)}"


def html_table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """An HTML table, as lines; a verdict is also a CSS class, for its colour."""
    head = "".join(f"<th>{html.escape(column)}</th>" for column in columns)
    body = [
        "<tr>"
        + "".join(
            f'<td data-label="{html.escape(column)}"{_verdict_class(cell)}>{html.escape(str(cell))}</td>'
            for column, cell in zip(columns, row, strict=True)
        )
        + "</tr>"
        for row in rows
    ]
    return ["<table>", f"<thead><tr>{head}</tr></thead>", "<tbody>", *body, "</tbody>", "</table>"]


def _verdict_class(cell: str) -> str:
    return f' class="{cell.replace(" ", "-")}"' if cell in VERDICTS else ""


def html_standing(claims: pd.DataFrame) -> list[str]:
    """How many claims hold: by paper, then by kind."""
    return [*html_table(*by_paper(claims)), *html_table(*by_kind(claims))]


def html_fragment(claims: pd.DataFrame) -> list[str]:
    """Every claim, for a page of any style."""
    lines = []
    for name, group in by_origin(claims).items():
        lines += [f"<h3>{html.escape(_heading(name, group))}</h3>", *html_table(TRIED, tried(group))]
    return [
        *lines,
        "<details><summary>Not run, and why</summary>",
        *html_table(NOT_RUN, not_run(claims)),
        "</details>",
    ]
