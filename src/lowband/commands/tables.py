"""collect, table, figure: run folders to tables to figures."""

import argparse
from pathlib import Path
from typing import Any

from lowband.commands import add_verb, calls
from lowband.errors import UserError


def add(commands: Any) -> None:
    collect = add_verb(
        commands, _collect, "collect", "run folders -> raw tables",
        "results/local/runs/* --out results/local/tables",
        "Where folders are too many for a command line, @FILE names a file that lists them, one a line.",
    )  # fmt: skip
    collect.add_argument("runs", nargs="+")
    collect.add_argument("--out", type=Path, required=True)

    table = add_verb(
        commands, calls("evidence.tables.build:write_table", "name", "tables", "out"), "table",
        "raw tables -> a derived table", "scaling --tables results/local/tables",
    )  # fmt: skip
    table.add_argument("name")
    table.add_argument("--tables", type=Path, required=True, help="folder of the tables it is made from")
    table.add_argument("--out", type=Path, help="folder to write it to (default: --tables)")

    figure = add_verb(
        commands, calls("evidence.report.figures:write_figure", "name", "tables", "out"), "figure",
        "a table -> a figure (PDF, PNG, CSV)",
        "scaling --tables results/local/tables --out figures/local",
    )  # fmt: skip
    figure.add_argument("name")
    figure.add_argument("--tables", type=Path, required=True)
    figure.add_argument("--out", type=Path, required=True)


def _collect(options: argparse.Namespace) -> None:
    from lowband.evidence.tables.collect import collect

    collect([run for text in options.runs for run in _listed(text)], options.out)


def _listed(text: str) -> list[Path]:
    """A run folder, or those that @FILE lists."""
    from lowband.spec.plain_data import read_lines

    if not text.startswith("@"):
        return [Path(text)]
    runs = [Path(line) for line in read_lines(Path(text[1:])) if line]
    if not runs:
        raise UserError("lists no runs", where=text[1:], allowed="run folders, one a line")
    return runs
