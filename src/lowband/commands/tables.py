"""collect, table, figure: run folders to tables to figures."""

import argparse
from pathlib import Path
from typing import Any

from lowband.commands import add_verb


def add(commands: Any) -> None:
    collect = add_verb(
        commands, "collect", "run folders -> raw tables", "results/local/runs/* --out results/local/tables",
        "Where folders are too many for a command line, @FILE names a file that lists them, one a line.",
    )  # fmt: skip
    collect.fromfile_prefix_chars = "@"
    collect.add_argument("runs", type=Path, nargs="+")
    collect.add_argument("--out", type=Path, required=True)
    collect.set_defaults(run=_collect)

    table = add_verb(
        commands, "table", "raw tables -> a derived table", "scaling --tables results/local/tables"
    )
    table.add_argument("name")
    table.add_argument("--tables", type=Path, required=True, help="folder of the tables it is made from")
    table.add_argument("--out", type=Path, help="folder to write it to (default: --tables)")
    table.set_defaults(run=_table)

    figure = add_verb(
        commands, "figure", "a table -> a figure (PDF, PNG, CSV)",
        "scaling --tables results/local/tables --out figures/local",
    )  # fmt: skip
    figure.add_argument("name")
    figure.add_argument("--tables", type=Path, required=True)
    figure.add_argument("--out", type=Path, required=True)
    figure.set_defaults(run=_figure)


def _collect(options: argparse.Namespace) -> None:
    from lowband.evidence.tables.collect import collect

    collect(options.runs, options.out)


def _table(options: argparse.Namespace) -> None:
    from lowband.evidence.tables.build import write_table

    write_table(options.name, options.tables, options.out or options.tables)


def _figure(options: argparse.Namespace) -> None:
    from lowband.evidence.report.figures import write_figure

    write_figure(options.name, options.tables, options.out)
