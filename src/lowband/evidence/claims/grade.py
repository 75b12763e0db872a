"""Claims + tables -> the rows of claims.csv.

verdict   met       our value has the claim's relation to its target
          not met   it was tried, and our value does not
          partial   an expected run is missing or did not end ok, whatever our value is
          fit       constants, or the rates of the links measured on, were fitted to this number
          not run   nothing was tried; `why` gives the reason
origin    this run, shipped, or computed (predictions: the same on every machine); `rows_from` has the machine
          and the commits, and the date of shipped ones
lacking   for a partial claim: every run that is missing or not ok, with its cause
values    the values that were aggregated, where there are a few

reported, ours and target are in `unit`; `printed` is the paper's number, in `printed_unit`.
"""

import operator
import re
from collections.abc import Collection, Mapping
from functools import cache, partial
from pathlib import Path
from typing import Any

import pandas as pd

from lowband.errors import UserError
from lowband.evidence.claims.claim import Claim, Query, Relation, Reported, read_claims
from lowband.evidence.claims.expected import Value, find_lack, one_of
from lowband.evidence.claims.experiments import Experiment, read_experiments
from lowband.evidence.claims.origin import SHIPPED, origin
from lowband.evidence.tables.points import EXPERIMENT
from lowband.spec.csv_tables import read_published, read_table

_HOLDS = {"<": operator.lt, "<=": operator.le, ">=": operator.ge, ">": operator.gt}
_FEW = 6  # the most values that are listed one by one


def grade_claims(
    claims_yaml: Path, tables_dir: Path, only: Collection[str] = (), root: Path = Path()
) -> pd.DataFrame:
    """A row per claim, or per one of `only` these, graded on the tables in `tables_dir`.

    root: the folder that holds config/suites and results/. Raises UserError for an unknown claim.
    """
    claims = read_claims(claims_yaml)
    known = [claim.id for claim in claims]
    if unknown := sorted(set(only) - set(known)):
        raise UserError(f"no claim '{unknown[0]}'", where=claims_yaml, allowed=known)
    experiments = read_experiments(claims_yaml.parent)
    effort = cache(partial(_effort, config=claims_yaml.parent))
    return pd.DataFrame(
        {
            **_statement(claim, claims_yaml),
            **effort(experiments[claim.experiment]),
            **_grade(claim, experiments[claim.experiment], tables_dir, root, f"{claims_yaml}: {claim.id}"),
        }
        for claim in claims
        if not only or claim.id in only
    )


def _effort(experiment: Experiment, config: Path) -> dict[str, Any]:
    return {
        "experiment": experiment.id,
        "command": experiment.command,
        "hardware": experiment.hardware,
        "human_minutes": experiment.human_minutes,
        "machine_minutes": experiment.minutes(config),
    }


def _statement(claim: Claim, claims_yaml: Path) -> dict[str, Any]:
    """The claim's statement, with the reported value and its source."""
    found = [(reported.csv, _reported_row(reported, claims_yaml)) for reported in claim.reported]
    printed = [str(row["value"]) for _, row in found]

    def joined(column: str) -> str:
        return " ; ".join(dict.fromkeys(str(row[column]) for _, row in found))

    return {
        "id": claim.id,
        "kind": claim.kind,
        "paper": claim.paper or "",
        "short": claim.short,
        "badge": claim.badge,
        "sentence": claim.sentence,
        "paper_element": claim.paper_element,
        "reported": _in_unit(claim, printed) if printed and not claim.not_run else None,
        "printed": " -> ".join(printed),
        "printed_unit": joined("unit") if found else "",
        "source": " ; ".join(dict.fromkeys(Path(csv).name for csv, _ in found)),
        "source_url": joined("source_url"),
        "read_as": joined("read_as"),
        "relation": claim.relation or "",
        "target": claim.target,
        "tolerance": None if claim.not_run else claim.tolerance,
        "unit": claim.unit,
        "query": " / ".join(query.text for query in claim.queries),
    }


def _reported_row(reported: Reported, claims_yaml: Path) -> "pd.Series[Any]":
    path = claims_yaml.parent / reported.csv
    rows = _filter(read_published(path), reported.where, str(path))
    if len(rows) != 1:
        raise UserError(f"{len(rows)} rows with {reported.where}", where=path, allowed="exactly one")
    return rows.iloc[0]


def reported_number(claim: Claim, claims_yaml: Path) -> float:
    """The paper's number in the claim's unit. Raises UserError unless each `reported` picks one row."""
    return _in_unit(claim, [str(_reported_row(one, claims_yaml)["value"]) for one in claim.reported])


def _in_unit(claim: Claim, printed: list[str]) -> float:
    """The reported value in the claim's unit. A paper's model size M, in `0.25M`, is the unit of a ratio."""
    numbers = []
    for text in printed:
        found = re.match(r"[\d.]+|M$", text)
        if found is None:
            raise UserError(f"no number in '{text}'", where=f"reported of claim {claim.id}")
        numbers.append(1.0 if found[0] == "M" else float(found[0]))
    if claim.reported_as == "ratio":
        return numbers[1] / numbers[0]
    return 1 + numbers[0] / 100 if claim.reported_as == "gain" else numbers[0]


def _grade(claim: Claim, experiment: Experiment, tables: Path, root: Path, where: str) -> dict[str, Any]:
    """Our value, the verdict and the origin of the rows. The worst experiment decides."""
    grade: dict[str, Any] = {
        "ours": None, "values": "", "deviation": None, "provenance": "", "origin": "", "rows_from": "",
        "rows": 0, "lacking": "",
    }  # fmt: skip
    if claim.ours is None or claim.relation is None or claim.target is None:
        return {**grade, "verdict": "not run", "why": claim.not_run}
    rows = _select(claim.ours, claim.evidence, tables, where)
    values = _per_experiment(claim.ours, rows)
    if claim.per is not None:
        # An experiment without rows on both sides has no ratio.
        values = values / _per_experiment(claim.per, _select(claim.per, claim.evidence, tables, where))
        values = values.dropna()
    source = origin(claim.ours.table, tables, root)
    lack = None
    if claim.expects is not None:
        lack = find_lack(claim.expects, claim.evidence, read_table(source.folder / "runs.csv"), root, where)
    if values.empty and not (lack and lack.runs):
        return {**grade, "verdict": "not run", "why": _why_nothing(claim, experiment, tables, where)}
    suite = claim.ours.where.get("suite")
    clusters, devices = (set(rows[column]) if column in rows else () for column in ("cluster", "device"))
    rows_from = list(
        source.machine(claim.evidence, suite if isinstance(suite, str) else None, clusters, devices)
    )
    if source.name == SHIPPED:
        rows_from.insert(1, str(experiment.shipped or ""))
    grade |= {
        "provenance": claim.evidence,
        "origin": source.name,
        "rows_from": ", ".join(filter(None, rows_from)),
        "rows": len(rows),
    }
    if values.empty:
        verdict = "partial"
    else:
        ours = _worst(values, claim.relation, claim.target * claim.divided_by) / claim.divided_by
        verdict = "met" if _holds(ours, claim) else "not met"
        grade |= {"ours": ours, "values": _listed(claim, rows), "deviation": ours - claim.target}
    why = ""
    if lack is not None and lack.runs:
        rest = "" if values.empty else f"; on the others: {verdict}"
        verdict, why = "partial", lack.why + rest
        grade["lacking"] = "; ".join(f"{run}: {cause}" for run, cause in lack.runs.items())
    elif unseen := _unseen(claim.ours, rows):
        verdict, why = "partial", f"no row with {', '.join(unseen)}; on the others: {verdict}"
    elif claim.is_fit:
        verdict, why = (
            "fit",
            "constants, or rates of links, were fitted to this number: it is not tested",
        )
    return {**grade, "verdict": verdict, "why": why}


def _unseen(query: Query, rows: pd.DataFrame) -> list[str]:
    """Of columns for which the query lists several values: those that no row has."""
    several = {column: value for column, value in query.where.items() if isinstance(value, tuple)}
    return [
        f"{column} {each}"
        for column, value in several.items()
        for each in value
        if each not in set(rows[column])
    ]


def _listed(claim: Claim, rows: pd.DataFrame) -> str:
    """The values that were aggregated into ours, if they are few and differ."""
    assert claim.ours is not None
    several = rows[claim.ours.column] / claim.divided_by
    is_few = len(several) <= _FEW and len(set(several)) > 1
    if claim.per is not None or claim.ours.aggregate == "sum" or not is_few:
        return ""
    return ", ".join(f"{value:.4g}" for value in several)


def _why_nothing(claim: Claim, experiment: Experiment, tables_dir: Path, where: str) -> str:
    """The cause that the queried rows name, if they exist and name one; else what it takes to have some."""
    assert claim.ours is not None
    rows = _filter(read_table(tables_dir / f"{claim.ours.table}.csv"), claim.ours.where, where)
    if "cause" in rows and rows["cause"].notna().any():
        return " ; ".join(rows["cause"].dropna().unique())
    queries = " / ".join(query.text for query in claim.queries)
    return f"not run here: needs {experiment.hardware}; no row for {queries}"


def _select(query: Query, evidence: str, tables_dir: Path, where: str) -> pd.DataFrame:
    """The rows that the query selects, of the claim's kind of evidence only."""
    if evidence == "measured" and query.column.startswith(("closed_form", "predicted")):
        raise UserError(
            f"column '{query.column}' is computed, but the claim's evidence is measured", where=where
        )
    table = read_table(tables_dir / f"{query.table}.csv")
    if query.column not in table:
        raise UserError(
            f"{query.table}.csv has no column '{query.column}'", where=where, allowed=table.columns
        )
    rows = _filter(table, {**query.where, "provenance": evidence}, where)
    return rows[rows[query.column].notna()]


def _filter(table: pd.DataFrame, wanted: Mapping[str, Value | tuple[Value, ...]], where: str) -> pd.DataFrame:
    is_wanted = pd.Series(True, index=table.index)
    for column, value in wanted.items():
        if column not in table:
            raise UserError(f"no column '{column}'", where=where, allowed=table.columns)
        is_wanted &= table[column].isin(one_of(value))
    return table.loc[is_wanted]


def _per_experiment(query: Query, rows: pd.DataFrame) -> "pd.Series[float]":
    """The aggregate of each experiment, so that suites and models are never combined into one number."""
    keys = [key for key in EXPERIMENT if key in rows]  # tables of kernels have no suite
    values: pd.Series[float] = rows.groupby(keys)[query.column].agg(query.aggregate)
    return values


def _worst(values: "pd.Series[float]", relation: Relation, target: float) -> float:
    if relation in ("<", "<="):
        return float(values.max())
    if relation in (">", ">="):
        return float(values.min())
    return float(values.iloc[(values - target).abs().argmax()])


def _holds(ours: float, claim: Claim) -> bool:
    """Whether the relation holds. A tolerance moves the target in the claim's favour."""
    assert claim.relation is not None and claim.target is not None
    if claim.relation == "==":
        return abs(ours - claim.target) <= claim.tolerance
    slack = claim.tolerance if claim.relation in ("<", "<=") else -claim.tolerance
    return bool(_HOLDS[claim.relation](ours, claim.target + slack))
