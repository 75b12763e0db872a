"""config/claims.yaml + tables -> graded claims.csv.

A claim states what must hold (a relation to a target) and where our value stands (a query of a table); the
reported value is looked up in the paper's own row of a CSV. No value of ours and none of a paper's is typed.
A claim that cannot be tried here says why and is graded `not run`.
"""

import operator
from pathlib import Path
from typing import Any, Literal

import pandas as pd
from pydantic import Field, model_validator

from lowband.errors import UserError
from lowband.report.claim_views import write_views
from lowband.report.experiments import Experiment, read_experiments
from lowband.report.files import read_published, read_table, write_csv
from lowband.report.tables import EXPERIMENT
from lowband.spec.strict import Strict, read_entries

Value = bool | str | int | float
Relation = Literal["<", "<=", "==", ">=", ">"]
Evidence = Literal["measured", "predicted"]

_HOLDS = {"<": operator.lt, "<=": operator.le, ">=": operator.ge, ">": operator.gt}


class Reported(Strict):
    """A row of a CSV of published numbers."""

    csv: str = Field(description="path, relative to claims.yaml")
    where: dict[str, str] = Field(description="column -> text, as in the CSV; picks exactly one row")


class Query(Strict):
    """One value per experiment, from a table in the tables' folder."""

    table: str
    where: dict[str, Value] = Field(default={}, description="column -> value that a row must have")
    column: str
    aggregate: Literal["max", "min", "sum", "mean", "median"]

    @property
    def said(self) -> str:
        """For a reader: box.csv [scheme=hier3, ranks=16] mean(efficiency)"""
        where = ", ".join(f"{column}={value}" for column, value in self.where.items())
        return f"{self.table}.csv [{where}] {self.aggregate}({self.column})"


class Claim(Strict):
    """An entry of claims.yaml. `target` and `tolerance` are in the unit of our value."""

    id: str
    short: str = Field(max_length=36, description="the sentence for one line of a screen")
    sentence: str
    paper_element: str = Field(description="where the claim stands, or what it checks of this artifact")
    kind: Literal["relation", "absolute"]
    experiment: str = Field(description="what it takes to try it: an entry of experiments.yaml")
    reported: tuple[Reported, ...] = Field(default=(), description="none for what no paper reports")
    evidence: Evidence = "measured"
    ours: Query | None = None
    per: Query | None = Field(default=None, description="what `ours` is divided by")
    unit: str = ""
    relation: Relation | None = None
    target: float | None = None
    tolerance: float = Field(default=0, description="how far from the target still passes")
    not_run: str = Field(default="", description="why it cannot be tried here")

    @model_validator(mode="after")
    def _gradable(self) -> "Claim":
        stated = [self.ours is not None, self.relation is not None, self.target is not None]
        if self.not_run and any(stated):
            raise ValueError("a claim with not_run has no ours, relation or target")
        if not self.not_run and not all(stated):
            raise ValueError("a claim has ours, relation and target, or says why it is not_run")
        return self


def read_claims(path: Path) -> list[Claim]:
    """The claims, relations first. Raises UserError for an entry that does not fit."""
    claims: list[Claim] = list(read_entries(Claim, path, "id").values())
    experiments = read_experiments(path.parent)
    for claim in claims:
        if claim.experiment not in experiments:
            raise UserError(
                f"no experiment '{claim.experiment}'", where=f"{path}: {claim.id}", allowed=experiments
            )
    return sorted(claims, key=lambda claim: claim.kind != "relation")


def sources(claim: Claim) -> list[str]:
    """The tables that the claim is graded on."""
    return list(dict.fromkeys(query.table for query in (claim.ours, claim.per) if query is not None))


def write_claims(claims_yaml: Path, tables_dir: Path, out: Path, only: str | None = None) -> None:
    """Grade the claims, or `only` one, against the tables in `tables_dir`; claims.{csv,md,tex,html} in `out`.

    Raises UserError for a claim that is not there.
    """
    claims = read_claims(claims_yaml)
    if only is not None and only not in {claim.id for claim in claims}:
        raise UserError(f"no claim '{only}'", where=claims_yaml, allowed=[claim.id for claim in claims])
    experiments = read_experiments(claims_yaml.parent)
    df = pd.DataFrame(
        {
            **_statement(claim, claims_yaml),
            **_effort(experiments[claim.experiment], claims_yaml.parent),
            **_grade(claim, tables_dir, f"{claims_yaml}: {claim.id}"),
        }
        for claim in claims
        if only in (None, claim.id)
    )
    write_csv(df, out / "claims.csv")
    write_views(df, out)


def _effort(experiment: Experiment, config: Path) -> dict[str, Any]:
    return {
        "experiment": experiment.id,
        "command": experiment.command,
        "hardware": experiment.hardware,
        "human_minutes": experiment.human_minutes,
        "machine_minutes": experiment.minutes(config),
    }


def _statement(claim: Claim, claims_yaml: Path) -> dict[str, Any]:
    """What is claimed, with the reported value and its source."""
    found = [(reported.csv, _reported_row(reported, claims_yaml)) for reported in claim.reported]

    def joined(column: str) -> str:
        return " ; ".join(dict.fromkeys(str(row[column]) for _, row in found))

    return {
        "id": claim.id,
        "kind": claim.kind,
        "short": claim.short,
        "sentence": claim.sentence,
        "paper_element": claim.paper_element,
        "reported": " -> ".join(str(row["value"]) for _, row in found),
        "reported_unit": joined("unit") if found else "",
        "source": " ; ".join(dict.fromkeys(Path(csv).name for csv, _ in found)),
        "source_url": joined("source_url"),
        "read_as": joined("read_as"),
        "relation": claim.relation or "",
        "target": claim.target,
        "tolerance": None if claim.not_run else claim.tolerance,
        "unit": claim.unit,
        "query": " / ".join(query.said for query in (claim.ours, claim.per) if query is not None),
    }


def _reported_row(reported: Reported, claims_yaml: Path) -> "pd.Series[Any]":
    path = claims_yaml.parent / reported.csv
    rows = _filter(read_published(path), dict(reported.where), str(path))
    if len(rows) != 1:
        raise UserError(f"{len(rows)} rows with {reported.where}", where=path, allowed="exactly one")
    return rows.iloc[0]


def _grade(claim: Claim, tables_dir: Path, where: str) -> dict[str, Any]:
    """Our value and the verdict: pass, short or not run. The worst experiment decides."""
    grade: dict[str, Any] = {"ours": None, "deviation": None, "provenance": "", "rows": 0}
    if claim.ours is None or claim.relation is None or claim.target is None:
        return {**grade, "verdict": "not run", "why": claim.not_run}
    rows = _select(claim.ours, claim.evidence, tables_dir, where)
    values = _per_experiment(claim.ours, rows)
    if claim.per is not None:
        # An experiment without rows on both sides has no ratio.
        values = values / _per_experiment(claim.per, _select(claim.per, claim.evidence, tables_dir, where))
        values = values.dropna()
    if values.empty:
        return {**grade, "verdict": "not run", "why": _why_nothing(claim, claim.ours, tables_dir, where)}
    ours = _worst(values, claim.relation, claim.target)
    return {
        "ours": ours,
        "deviation": ours - claim.target,
        "provenance": claim.evidence,
        "rows": len(rows),
        "verdict": "pass" if _holds(ours, claim) else "short",
        "why": "",
    }


def _why_nothing(claim: Claim, ours: Query, tables_dir: Path, where: str) -> str:
    """The cause that the asked rows name, if they are there and name one."""
    rows = _filter(read_table(tables_dir / f"{ours.table}.csv"), ours.where, where)
    if "cause" in rows and rows["cause"].notna().any():
        return " ; ".join(rows["cause"].dropna().unique())
    asked = [query.where for query in (claim.ours, claim.per) if query is not None]
    return f"no row of {ours.table}.csv with {asked}"


def _select(query: Query, evidence: Evidence, tables_dir: Path, where: str) -> pd.DataFrame:
    """The rows asked for, of the claim's kind of evidence only."""
    if evidence == "measured" and query.column.startswith(("closed_form", "predicted")):
        raise UserError(f"column '{query.column}' is computed, the claim says measured", where=where)
    table = read_table(tables_dir / f"{query.table}.csv")
    if query.column not in table:
        raise UserError(
            f"{query.table}.csv has no column '{query.column}'", where=where, allowed=table.columns
        )
    rows = _filter(table, {**query.where, "provenance": evidence}, where)
    return rows[rows[query.column].notna()]


def _filter(table: pd.DataFrame, wanted: dict[str, Value], where: str) -> pd.DataFrame:
    for column, value in wanted.items():
        if column not in table:
            raise UserError(f"no column '{column}'", where=where, allowed=table.columns)
        table = table.loc[table[column] == value]
    return table


def _per_experiment(query: Query, rows: pd.DataFrame) -> "pd.Series[float]":
    """The aggregate of each experiment, so that suites and models are never summed up into one number."""
    keys = [key for key in EXPERIMENT if key in rows]  # tables of kernels know no suite
    values: pd.Series[float] = rows.groupby(keys)[query.column].agg(query.aggregate)
    return values


def _worst(values: "pd.Series[float]", relation: Relation, target: float) -> float:
    if relation in ("<", "<="):
        return float(values.max())
    if relation in (">", ">="):
        return float(values.min())
    return float(values.iloc[(values - target).abs().argmax()])


def _holds(ours: float, claim: Claim) -> bool:
    """A tolerance moves the target in the claim's favour."""
    assert claim.relation is not None and claim.target is not None
    if claim.relation == "==":
        return abs(ours - claim.target) <= claim.tolerance
    slack = claim.tolerance if claim.relation in ("<", "<=") else -claim.tolerance
    return bool(_HOLDS[claim.relation](ours, claim.target + slack))
