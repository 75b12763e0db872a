"""claims, summary, appendix, page, documents, provenance, verify, watch, status: a reproduction's results."""

import argparse
from pathlib import Path
from typing import Any

from lowband.commands import add_verb, calls, name, root


def add(commands: Any) -> None:
    claims = add_verb(
        commands, _claims, "claims", "grade the claims against the tables", "--tables results/local/tables"
    )
    claims.add_argument("--claims", type=Path, default=Path("config/claims.yaml"))
    claims.add_argument("--tables", type=Path, required=True)
    claims.add_argument("--only", nargs="+", default=[], metavar="ID", help="only these claims")
    claims.add_argument("--out", type=Path, help="folder of claims.{csv,md,tex,html} (default: --tables)")

    summary = add_verb(
        commands, _summary, "summary", "which claims hold, and where tables and figures are",
        "--tables results/local/tables --figures figures/local",
    )  # fmt: skip
    summary.add_argument("--tables", type=Path, required=True)
    summary.add_argument("--claims", type=Path, help="the graded claims.csv (default: that in --tables)")
    summary.add_argument("--figures", type=Path, help="default: no figures were drawn")

    appendix = add_verb(
        commands, _appendix, "appendix", "graded claims -> artifact appendices (LaTeX)",
        "--claims results/local/tables/claims.csv --out results/local",
    )  # fmt: skip
    appendix.add_argument("--claims", type=Path, required=True, help="the graded claims.csv")
    appendix.add_argument("--config", type=Path, default=Path("config"), help="folder of experiments.yaml")
    appendix.add_argument("--out", type=Path, required=True)

    page = add_verb(
        commands, _page, "page", "tables and figures -> one self-contained HTML page",
        "--tables results/local/tables --figures figures/local --out page.html",
    )  # fmt: skip
    page.add_argument("--tables", type=Path, required=True)
    page.add_argument("--figures", type=Path, required=True)
    page.add_argument("--out", type=Path, required=True, help="the page")
    page.add_argument("--own", action="store_true", help="of this reproduction's own runs alone")
    page.add_argument("--root", type=root, default=Path(), help="folder that holds config/ and slurm/")

    documents = add_verb(commands, _documents, "documents", "update the results quoted in docs/", "")
    documents.add_argument("--root", type=root, default=Path(), help="folder that holds docs/ and results/")

    provenance = add_verb(
        commands, calls("evidence.report.provenance:write_crate", "root", "results", "out"), "provenance",
        "a finished reproduction -> an RO-Crate, one zip",
        "--results local --out crate.zip",
    )  # fmt: skip
    provenance.add_argument("--results", type=name, required=True, help="its folder under results/")
    provenance.add_argument("--out", type=Path, required=True, help="the zip")
    provenance.add_argument("--root", type=root, default=Path(), help="folder that holds results/")

    verify = add_verb(commands, _verify, "verify", "check the shipped data against SHA256SUMS", "")
    verify.add_argument("--write", action="store_true", help="write a new SHA256SUMS")
    verify.add_argument("--root", type=root, default=Path(), help="folder that holds results/")

    watch = add_verb(
        commands, _watch, "watch", "a command of the workflow under a bar with the time left",
        "--results smoke -- snakemake -c2 --config 'suites=[smoke]' results=smoke",
        "What the command prints goes to logs/<results>/snakemake.log; the exit code is its own.",
    )  # fmt: skip
    watch.add_argument("--results", type=name, required=True, help="its folder under results/")
    watch.add_argument("--root", type=root, default=Path(), help="folder that holds config/ and results/")
    watch.add_argument("command", nargs=argparse.REMAINDER, help="after --")

    status = add_verb(
        commands, _status, "status", "which runs are done, running or failed; time left",
        "--results local --follow",
    )  # fmt: skip
    status.add_argument(
        "--results", type=name, default="local", help="its folder under results/ (default: local)"
    )
    status.add_argument(
        "--suite", nargs="+", help="default: those of the folder; of `local`, those of config/config.yaml"
    )
    status.add_argument("--follow", action="store_true", help="until every run has ended")
    status.add_argument("--root", type=root, default=Path(), help="folder that holds config/ and results/")


def _claims(options: argparse.Namespace) -> None:
    from lowband.evidence.report.claim_views import write_claims

    write_claims(options.claims, options.tables, options.out or options.tables, options.only)


def _summary(options: argparse.Namespace) -> None:
    from lowband.evidence.report.summary import summary
    from lowband.spec.csv_tables import made_of

    with made_of(options.tables):
        print(summary(options.claims or options.tables / "claims.csv", options.tables, options.figures))


def _appendix(options: argparse.Namespace) -> None:
    from lowband.evidence.report.appendix import write_appendices
    from lowband.spec.csv_tables import made_of

    with made_of(options.claims):
        write_appendices(options.claims, options.config, options.out)


def _page(options: argparse.Namespace) -> None:
    from lowband.evidence.report.page import write_own_page, write_page
    from lowband.spec.csv_tables import made_of

    write = write_own_page if options.own else write_page
    with made_of(options.tables):
        write(options.root, options.tables, options.figures, options.out)


def _documents(options: argparse.Namespace) -> None:
    from lowband.evidence.report.documents import write_documents
    from lowband.evidence.report.page.placement import write_picture

    write_documents(options.root)
    write_picture(options.root)


def _verify(options: argparse.Namespace) -> int:
    from lowband.evidence.report.verify import verify, write_sums

    if options.write:
        write_sums(options.root)
    good, wrong = verify(options.root)
    print("\n".join([*wrong, f"{good} files match SHA256SUMS, {len(wrong)} do not"]))
    return 1 if wrong else 0


def _watch(options: argparse.Namespace) -> int:
    from lowband.errors import UserError
    from lowband.run.watch import watch

    command = options.command[1:] if options.command[:1] == ["--"] else options.command
    if not command:
        raise UserError("no command", allowed="lowband watch --results NAME -- COMMAND")
    log = options.root / "logs" / options.results / "snakemake.log"
    return watch(command, options.root, options.results, log)


def _status(options: argparse.Namespace) -> None:
    from lowband.run.status import DEFAULT_RESULTS, follow, read_status, report, suites_of
    from lowband.spec.config import Config

    suites = options.suite
    if suites is None and options.results == DEFAULT_RESULTS:  # which may lack runs of some suites
        suites = Config(options.root).default_suites
    elif suites is None:
        suites = suites_of(options.root, options.results)
    if options.follow:
        follow(options.root, options.results, suites)
    print(report(read_status(options.root, options.results, suites)))
