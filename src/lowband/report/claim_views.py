"""Graded claims for a reader: Markdown, LaTeX (booktabs) and HTML of the same cells.

Two tables: what was tried, relations before absolute numbers, and what was not, with the reason.
"""

import html
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from lowband.errors import UserError
from lowband.report.files import read_table
from lowband.spec.files import write_whole

VERDICTS = ("pass", "short", "not run")
TRIED = ("verdict", "claim", "paper element", "reported", "ours", "must be", "kind", "evidence", "experiment")
NOT_RUN = ("claim", "paper element", "reported", "why not run")

Rows = list[list[str]]


def read_graded(path: Path) -> pd.DataFrame:
    """A claims.csv. Raises UserError for another table."""
    claims = read_table(path)
    if not {"verdict", "experiment"} <= set(claims):
        raise UserError("no graded claims", where=path, allowed="a claims.csv that `lowband claims` wrote")
    return claims


def ours(claim: "pd.Series[Any]") -> str:
    """Our value, to four digits."""
    return "" if pd.isna(claim["ours"]) else f"{claim['ours']:.4g}"


def must_be(claim: "pd.Series[Any]") -> str:
    """The relation that decides, with its tolerance."""
    if pd.isna(claim["target"]):
        return ""
    slack = f" +- {claim['tolerance']:g}" if claim["tolerance"] else ""
    return f"{claim['relation']} {claim['target']:g}{slack}"


def minutes(value: float) -> str:
    """Minutes of a machine or a reader, rounded up to what a plan needs; empty where there is none."""
    return "" if pd.isna(value) else f"{max(1, round(value))}"


def tried(claims: pd.DataFrame) -> Rows:
    """The cells under TRIED."""
    rows = claims[claims["verdict"] != "not run"]
    return [
        [
            row["verdict"], row["short"], row["paper_element"], _reported(row), ours(row), must_be(row),
            row["kind"], row["provenance"], row["experiment"],
        ]
        for _, row in rows.iterrows()
    ]  # fmt: skip


def not_run(claims: pd.DataFrame) -> Rows:
    """The cells under NOT_RUN."""
    rows = claims[claims["verdict"] == "not run"]
    return [[row["short"], row["paper_element"], _reported(row), row["why"]] for _, row in rows.iterrows()]


def _reported(claim: "pd.Series[Any]") -> str:
    return "" if pd.isna(claim["reported"]) else str(claim["reported"])


def tally(claims: pd.DataFrame) -> str:
    """How many of each verdict, as one phrase."""
    counts = claims["verdict"].value_counts()
    return ", ".join(f"{counts.get(verdict, 0)} {verdict}" for verdict in VERDICTS)


def markdown_table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """The lines of a table."""
    lines = [columns, ["---"] * len(columns), *rows]
    return ["| " + " | ".join(str(cell).replace("|", "\\|") for cell in cells) + " |" for cells in lines]


def markdown(claims: pd.DataFrame) -> list[str]:
    """Both tables; the second one folded."""
    return [
        f"{len(claims)} claims: {tally(claims)}.",
        "",
        *markdown_table(TRIED, tried(claims)),
        "",
        "<details><summary>Not run, and why</summary>",
        "",
        *markdown_table(NOT_RUN, not_run(claims)),
        "",
        "</details>",
    ]


_LATEX = {
    "\\": r"\textbackslash{}", "&": r"\&", "%": r"\%", "$": r"\$", "#": r"\#", "_": r"\_", "{": r"\{",
    "}": r"\}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "<": r"\textless{}",
    ">": r"\textgreater{}", "|": r"\textbar{}", '"': r"\textquotedbl{}",
}  # fmt: skip

_SIGNS = {"+-": r"$\pm$", r"\textless{}=": r"$\leq$", r"\textgreater{}=": r"$\geq$", "==": "="}


def latex_text(text: object) -> str:
    """Plain text, with what LaTeX would take for a command written out."""
    written = "".join(_LATEX.get(letter, letter) for letter in str(text))
    for typed, sign in _SIGNS.items():
        written = written.replace(typed, sign)
    return written


def _latex_table(columns: Sequence[str], widths: Sequence[str], rows: Rows) -> list[str]:
    head = " & ".join(rf"\textbf{{{latex_text(column)}}}" for column in columns) + r" \\"
    spec = "".join(rf">{{\raggedright\arraybackslash}}p{{{width}\textwidth}}" for width in widths)
    return [
        rf"\begin{{longtable}}{{@{{}}{spec}@{{}}}}",
        r"\toprule",
        head,
        r"\midrule",
        r"\endhead",
        *[" & ".join(latex_text(cell) for cell in row) + r" \\" for row in rows],
        r"\bottomrule",
        r"\end{longtable}",
    ]


def latex(claims: pd.DataFrame) -> list[str]:
    """Both tables, for \\input; needs the packages booktabs, longtable and array, and T1 fonts.

    Claims are numbered in their order, as the appendices call them.
    """
    is_tried = claims["verdict"] != "not run"
    numbers = [f"C{number}" for number in range(1, len(claims) + 1)]

    def numbered(rows: Rows, wanted: "pd.Series[bool]") -> Rows:
        mine = [number for number, is_mine in zip(numbers, wanted, strict=True) if is_mine]
        return [[number, *row] for number, row in zip(mine, rows, strict=True)]

    columns = [column for column in TRIED if column not in ("kind", "experiment")]
    rows = [[row[TRIED.index(column)] for column in columns] for row in tried(claims)]
    return [
        "% Generated by `lowband claims`.",
        r"{\scriptsize\setlength{\tabcolsep}{3.5pt}",
        *_latex_table(
            ["no.", *columns],
            [".04", ".05", ".2", ".24", ".09", ".08", ".09", ".08"],
            numbered(rows, is_tried),
        ),
        *_latex_table(
            ["no.", *NOT_RUN], [".04", ".22", ".29", ".1", ".27"], numbered(not_run(claims), ~is_tried)
        ),
        "}",
    ]


def html_table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """The lines of a table; a verdict is also a class, for its colour."""
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


def html_fragment(claims: pd.DataFrame) -> list[str]:
    """Both tables, for a page of any style."""
    return [
        f"<p>{len(claims)} claims: {tally(claims)}.</p>",
        *html_table(TRIED, tried(claims)),
        "<details><summary>Not run, and why</summary>",
        *html_table(NOT_RUN, not_run(claims)),
        "</details>",
    ]


VIEWS: dict[str, Callable[[pd.DataFrame], list[str]]] = {"md": markdown, "tex": latex, "html": html_fragment}


def write_views(claims: pd.DataFrame, folder: Path) -> None:
    """claims.md, claims.tex and claims.html in `folder`."""
    for suffix, view in VIEWS.items():
        write_whole(folder / f"claims.{suffix}", "\n".join(view(claims)) + "\n")
