"""Tables for a reader: each is a frame of text, written as Markdown, HTML or LaTeX."""

import re
from collections.abc import Mapping
from pathlib import Path

import pandas as pd
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup, escape

# Templates of HTML; page/macros.html.j2 has the one for a table.
HTML = Environment(
    loader=FileSystemLoader(Path(__file__).parent / "page"), autoescape=True, undefined=StrictUndefined,
    trim_blocks=True, lstrip_blocks=True,
)  # fmt: skip

_QUOTED = re.compile(r"`([^`]+)`")  # code in plain text, as in Markdown


def html_text(text: str) -> Markup:
    """Plain text for a page, with what stands in backticks as code."""
    return Markup(_QUOTED.sub(r"<code>\1</code>", str(escape(text))))


HTML.filters["code"] = html_text

_LATEX = str.maketrans(
    {
        "\\": r"\textbackslash{}", "&": r"\&", "%": r"\%", "$": r"\$", "#": r"\#", "_": r"\_", "{": r"\{",
        "}": r"\}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "<": r"\textless{}",
        ">": r"\textgreater{}", "|": r"\textbar{}", '"': r"\textquotedbl{}",
    }
)  # fmt: skip
_SIGNS = {"+-": r"$\pm$", r"\textless{}=": r"$\leq$", r"\textgreater{}=": r"$\geq$", "==": "="}


def filled(table: pd.DataFrame, cells: Mapping[str, str]) -> pd.DataFrame:
    """A frame of text: under each heading its format, filled in from each row of `table`."""
    rows = table.to_dict("records")
    return pd.DataFrame({heading: [form.format_map(row) for row in rows] for heading, form in cells.items()})


def markdown(table: pd.DataFrame) -> list[str]:
    """A Markdown table, as lines.

    pandas would pad each cell to the widest of its column, and one long cell would change every line.
    """
    lines = [list(table.columns), ["---"] * table.shape[1], *table.to_numpy().tolist()]
    return ["| " + " | ".join(str(cell).replace("|", "\\|") for cell in cells) + " |" for cells in lines]


def latex(table: pd.DataFrame, widths: list[float]) -> str:
    """A longtable with columns of these shares of the text's width; needs booktabs, longtable and array."""
    columns = "".join(rf">{{\raggedright\arraybackslash}}p{{{width}\textwidth}}" for width in widths)
    table = table.map(latex_text).rename(columns=lambda name: rf"\textbf{{{latex_text(name)}}}")
    return table.to_latex(index=False, escape=False, longtable=True, column_format=f"@{{}}{columns}@{{}}")


def latex_text(text: object) -> str:
    """Plain text, with LaTeX's special characters escaped, and what stands in backticks as code."""
    parts = _QUOTED.split(str(text))  # text, code, text, ...
    return "".join(latex_code(part) if place % 2 else _plain(part) for place, part in enumerate(parts))


def latex_code(text: object) -> str:
    """A command or a name in typewriter type, each character as it is typed: no ligature, no curly quote."""
    written = str(text).translate(_LATEX)
    for typed, sign in {"-": "-{}", "'": r"\textquotesingle{}", "`": r"\textasciigrave{}"}.items():
        written = written.replace(typed, sign)
    return rf"\texttt{{{written}}}"


def _plain(text: str) -> str:
    written = text.translate(_LATEX)
    for typed, sign in _SIGNS.items():
        written = written.replace(typed, sign)
    return written.replace("--", "-{}-")
