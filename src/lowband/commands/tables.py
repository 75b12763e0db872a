"""collect, table, figure: run folders to tables to figures."""

from pathlib import Path
from typing import Any

from lowband.commands import add_verb, calls


def add(commands: Any) -> None:
    collect = add_verb(
        commands, calls("evidence.tables.collect:collect", "runs", "out"), "collect",
        "run folders -> raw tables", "results/local/runs/* --out results/local/tables",
        "Where folders are too many for a command line, @FILE names a file that lists them, one a line.",
    )  # fmt: skip
    collect.fromfile_prefix_chars = "@"
    collect.add_argument("runs", type=Path, nargs="+")
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
