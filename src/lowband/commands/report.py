"""claims, summary, appendix, page: what a reproduction shows."""

import argparse
from pathlib import Path
from typing import Any


def add(commands: Any) -> None:
    claims = commands.add_parser("claims", help="grade the claims against the tables")
    claims.add_argument("--claims", type=Path, default=Path("config/claims.yaml"))
    claims.add_argument("--tables", type=Path, required=True)
    claims.add_argument("--only", metavar="ID", help="this claim alone")
    claims.add_argument("--out", type=Path, help="folder of claims.{csv,md,tex,html} (default: --tables)")
    claims.set_defaults(run=_claims)

    summary = commands.add_parser("summary", help="which claims hold, and where tables and figures lie")
    summary.add_argument("--tables", type=Path, required=True)
    summary.add_argument("--figures", type=Path, required=True)
    summary.set_defaults(run=_summary)

    appendix = commands.add_parser("appendix", help="graded claims -> artifact appendices (LaTeX)")
    appendix.add_argument("--claims", type=Path, required=True, help="the graded claims.csv")
    appendix.add_argument("--config", type=Path, default=Path("config"), help="folder of experiments.yaml")
    appendix.add_argument("--out", type=Path, required=True)
    appendix.set_defaults(run=_appendix)

    page = commands.add_parser("page", help="tables and figures -> one self-contained HTML page")
    page.add_argument("--tables", type=Path, required=True)
    page.add_argument("--figures", type=Path, required=True)
    page.add_argument("--out", type=Path, required=True, help="the page")
    page.add_argument("--root", type=Path, default=Path(), help="folder that holds config/ and slurm/")
    page.set_defaults(run=_page)


def _claims(options: argparse.Namespace) -> None:
    from lowband.report.claims import write_claims

    write_claims(options.claims, options.tables, options.out or options.tables, options.only)


def _summary(options: argparse.Namespace) -> None:
    from lowband.report.summary import summary

    print(summary(options.tables / "claims.csv", options.tables, options.figures))


def _appendix(options: argparse.Namespace) -> None:
    from lowband.report.appendix import write_appendices

    write_appendices(options.claims, options.config, options.out)


def _page(options: argparse.Namespace) -> None:
    from lowband.report.page import write_page

    write_page(options.root, options.tables, options.figures, options.out)
