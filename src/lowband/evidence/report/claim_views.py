"""Graded claims for a reader: the same frames of text as Markdown, HTML and LaTeX.

First the number that hold, by paper and by kind; then the claims that were tried, on this run's results and
on shipped ones; then those that were not tried, with the reason.
"""

from collections.abc import Callable, Collection, Hashable, Mapping
from pathlib import Path
from typing import Any, TypeAlias

import pandas as pd

from lowband.errors import UserError
from lowband.evidence.claims.claim import KINDS, PAPERS
from lowband.evidence.claims.grade import grade_claims
from lowband.evidence.claims.origin import ORIGINS
from lowband.evidence.report.writers import HTML, latex, markdown
from lowband.spec.csv_tables import made_of, read_once, read_table, write_csv
from lowband.spec.files import write_whole

Claim: TypeAlias = "pd.Series[Any] | Mapping[Hashable, Any]"  # a row of claims.csv, by column

VERDICTS = ("met", "not met", "partial", "fit", "not run")


def read_graded(path: Path) -> pd.DataFrame:
    """Read a claims.csv. Raises UserError for another table."""
    claims = read_table(path)
    if not {"verdict", "experiment", "origin"} <= set(claims):
        raise UserError("no graded claims", where=path, allowed="a claims.csv that `lowband claims` wrote")
    return claims


def write_claims(
    claims_yaml: Path, tables_dir: Path, out: Path, only: Collection[str] = (), root: Path = Path()
) -> None:
    """Grade the claims, or `only` these, on the tables in `tables_dir`; claims.{csv,md,tex,html} in `out`.

    root: the folder that holds config/suites and results/. Raises UserError for an unknown claim.
    """
    with made_of(tables_dir), read_once():
        graded = grade_claims(claims_yaml, tables_dir, only, root)
    write_csv(graded, out / "claims.csv")
    claims = read_table(out / "claims.csv")  # an empty text is a missing value from here on
    write_whole(out / "claims.md", "\n".join(claims_markdown(claims)) + "\n")
    write_whole(out / "claims.tex", claims_latex(claims))
    page = HTML.get_template("claims.html.j2").render(
        by_paper=by_paper(claims), by_kind=by_kind(claims), groups=headed(claims), not_run=not_run(claims)
    )
    write_whole(out / "claims.html", page)


def is_tried(claims: pd.DataFrame) -> "pd.Series[bool]":
    return claims["verdict"] != "not run"


def ours(claim: Claim) -> str:
    """Our value, to four digits."""
    return "" if pd.isna(claim["ours"]) else f"{claim['ours']:.4g}"


def reported(claim: Claim) -> str:
    """The paper's value in the unit of ours; as printed if the claim was not tried."""
    if pd.notna(claim["reported"]):
        return f"{claim['reported']:.4g}"
    if claim["verdict"] != "not run" or pd.isna(claim["printed"]):
        return ""
    return " ".join(str(claim[column]) for column in ("printed", "printed_unit") if pd.notna(claim[column]))


def must_be(claim: Claim) -> str:
    """The relation that must hold, with its tolerance and the unit of reported, ours and target."""
    if pd.isna(claim["target"]):
        return ""
    slack = f" +- {claim['tolerance']:g}" if claim["tolerance"] else ""
    unit = "" if pd.isna(claim["unit"]) else f" {claim['unit']}"
    return f"{claim['relation']} {claim['target']:g}{slack}{unit}"


def minutes(value: float | None) -> str:
    """Minutes of a machine or a reader, rounded up for planning; empty if there is none."""
    return "" if value is None else f"{max(1, round(value))}"


def rows_from(claim: Claim) -> str:
    """Whether this run measured the rows or they are shipped, with machine, date, commit and experiment."""
    machine: str = "" if pd.isna(claim["rows_from"]) else f": {claim['rows_from']}"
    return f"{claim['origin']}{machine}; {claim['provenance']}, experiment {claim['experiment']}"


def note(claim: Claim) -> str:
    """Details behind a verdict: each value if a few were aggregated, and why it is not met."""
    each: str = "" if pd.isna(claim["values"]) else f"each: {claim['values']}"
    return "; ".join(filter(None, (each, "" if pd.isna(claim["why"]) else str(claim["why"]))))


def tried(claims: pd.DataFrame) -> pd.DataFrame:
    """The claims that were tried, as text; the index is that of `claims`."""
    return _as_text(claims[is_tried(claims)])


def _as_text(rows: pd.DataFrame) -> pd.DataFrame:
    return pd.DataFrame(
        {
            "verdict": rows["verdict"], "claim": rows["short"], "about": rows["paper_element"],
            "kind": rows["kind"], "reported": _each(reported, rows), "ours": _each(ours, rows),
            "must be": _each(must_be, rows), "rows from": _each(rows_from, rows), "note": _each(note, rows),
        }
    )  # fmt: skip


def headlines(claims: pd.DataFrame, names: Mapping[str, str]) -> pd.DataFrame:
    """The claims with these ids under other names, as text."""
    shown = _as_text(claims.set_index("id").loc[list(names)]).assign(claim=list(names.values()))
    return shown[["verdict", "claim", "reported", "ours", "must be"]]


def _each(text: Callable[[Claim], str], claims: pd.DataFrame) -> list[str]:
    return [text(claim) for claim in claims.to_dict("records")]


def not_run(claims: pd.DataFrame) -> pd.DataFrame:
    """The claims that were not tried, as text; the index is that of `claims`."""
    rows = claims[~is_tried(claims)]
    named = rows.rename(columns={"short": "claim", "paper_element": "about", "why": "why not run"})
    return named.assign(reported=_each(reported, rows))[["claim", "about", "reported", "why not run"]]


def tally(claims: pd.DataFrame) -> str:
    """The number of claims of each verdict, as one phrase; verdicts without claims are left out."""
    counts = claims["verdict"].value_counts()
    return ", ".join(f"{counts[verdict]} {verdict}" for verdict in VERDICTS if verdict in counts) or "none"


def ended(runs: pd.DataFrame) -> str:
    """How the runs of a runs.csv ended, as one phrase."""
    return ", ".join(f"{count} {status}" for status, count in runs["status"].value_counts().items())


def by_origin(claims: pd.DataFrame) -> dict[str, pd.DataFrame]:
    """The claims that were tried, by the origin of their rows; this run's come first."""
    groups = {name: claims[is_tried(claims) & (claims["origin"] == name)] for name in ORIGINS}
    return {name: group for name, group in groups.items() if len(group)}


def tally_apart(claims: pd.DataFrame) -> str:
    """Separate tallies of the claims tried on this run's results and of the rest."""
    parts = [f"{name}: {tally(group)}" for name, group in by_origin(claims).items()]
    return "; ".join([*parts, f"not run: {int((~is_tried(claims)).sum())}"])


def by_paper(claims: pd.DataFrame) -> pd.DataFrame:
    """Verdicts of each paper's claims, and of those about the artifact itself."""
    others = {name: name for name in claims["paper"].dropna().unique() if name not in PAPERS}
    named = {about: claims[claims["paper"] == paper] for paper, about in {**PAPERS, **others}.items()}
    return _standing("paper", {**named, KINDS["artifact"]: claims[claims["paper"].isna()]})


def by_kind(claims: pd.DataFrame) -> pd.DataFrame:
    """Verdicts of relations, absolute numbers and claims about the artifact itself."""
    return _standing("kind", {about: claims[claims["kind"] == kind] for kind, about in KINDS.items()})


def _standing(first: str, groups: dict[str, pd.DataFrame]) -> pd.DataFrame:
    """Verdicts per group, with a column for each origin that occurs."""
    origins = list(by_origin(pd.concat(groups.values())))
    rows = []
    for about, claims in groups.items():
        apart, graded = by_origin(claims), int(is_tried(claims).sum())
        counts = {first: about, "claims": str(len(claims)), "graded": str(graded)}
        verdicts = {name: tally(apart[name]) if name in apart else "-" for name in origins}
        rows.append({**counts, **verdicts, "not possible here": str(len(claims) - graded)})
    return pd.DataFrame(rows)


def headed(claims: pd.DataFrame) -> dict[str, pd.DataFrame]:
    """Heading -> the claims that were tried, as text, by the origin of their rows."""
    return {
        f"{name[0].upper()}{name[1:]}, {len(group)} claims: {tally(group)}": tried(group)
        for name, group in by_origin(claims).items()
    }


def claims_markdown(claims: pd.DataFrame) -> list[str]:
    """The number of claims that hold, then every claim; those not run are folded."""
    lines = [*markdown(by_paper(claims)), "", *markdown(by_kind(claims)), ""]
    for heading, rows in headed(claims).items():
        lines += [f"**{heading}**", "", *markdown(rows), ""]
    folded = "<details><summary>Not run, and why</summary>"
    return [*lines, folded, "", *markdown(not_run(claims)), "", "</details>"]


def claims_latex(claims: pd.DataFrame) -> str:
    """Both tables, for \\input in a paper; claims are numbered in order."""
    both = (
        (tried(claims), [0.03, 0.05, 0.14, 0.16, 0.05, 0.06, 0.07, 0.09, 0.14, 0.11]),
        (not_run(claims), [0.04, 0.22, 0.29, 0.1, 0.27]),
    )
    for rows, _ in both:
        rows.insert(0, "no.", [f"{place + 1}" for place in rows.index])
    tables = "".join(latex(rows, widths) for rows, widths in both)
    return "% Generated by `lowband claims`.\n{\\scriptsize\\setlength{\\tabcolsep}{3.5pt}\n" + tables + "}\n"
