"""Reader of config/claims.yaml: each claim, the paper it is about, and the test that decides it.

A claim states a relation to a target that must hold, and a query of a table that yields our value; the
reported value is looked up in the paper's own row of a CSV. Neither value is ever typed in by hand.
A claim that cannot be tried here states why and is graded `not run`. `grade.py` grades them.
"""

from pathlib import Path
from typing import Literal

from pydantic import Field, model_validator

from lowband.errors import UserError
from lowband.evidence.claims.expected import Wanted, one_of
from lowband.evidence.claims.experiments import read_experiments
from lowband.evidence.tables.entries import TABLES
from lowband.spec.yaml_model import Strict, read_entries

Relation = Literal["<", "<=", "==", ">=", ">"]
Evidence = Literal["measured", "predicted"]
Kind = Literal["relation", "absolute", "artifact"]

KINDS: dict[Kind, str] = {  # in the order in which claims are listed
    "relation": "relations that a paper states",
    "absolute": "absolute numbers of a paper",
    "artifact": "about this artifact itself",
}
PAPERS = {  # papers whose claims are shipped; a claims file of one's own may name others
    "2501.04266": "low-bandwidth partitioning on Frontier (arXiv 2501.04266)",
    "2306.10209": "ZeRO++ (arXiv 2306.10209)",
    "2307.08691": "FlashAttention-2 (arXiv 2307.08691)",
    "2001.04438": "Two-Pass Softmax (arXiv 2001.04438)",
}

_OF_RUNS = {"runs", "steps", "bytes", "states", "outside"}  # raw tables with rows of runs


class Reported(Strict):
    """A row of a CSV of published numbers."""

    csv: str = Field(description="path, relative to claims.yaml")
    where: dict[str, str] = Field(description="column -> text, as in the CSV; picks exactly one row")


class Query(Strict):
    """One value per experiment, from a table in the tables' folder."""

    table: str
    where: Wanted = Field(default={}, description="column -> value that a row must have, or a list of them")
    column: str
    aggregate: Literal["max", "min", "sum", "mean", "median"]

    @property
    def text(self) -> str:
        """The query for a reader, such as: box.csv [scheme=hier3, ranks=16|32] mean(efficiency)"""
        where = ", ".join(
            f"{column}={'|'.join(map(str, one_of(value)))}" for column, value in self.where.items()
        )
        return f"{self.table}.csv [{where}] {self.aggregate}({self.column})"

    @property
    def is_of_runs(self) -> bool:
        """Whether the table's rows come from runs of suites, and not from a benchmark or a prediction."""
        sources = TABLES[self.table].sources if self.table in TABLES else ()
        return self.table in _OF_RUNS or bool(_OF_RUNS & set(sources))


class Claim(Strict):
    """An entry of claims.yaml. `target` and `tolerance` are in `unit`."""

    id: str
    short: str = Field(max_length=36, description="the sentence for one line of a screen")
    sentence: str
    paper_element: str = Field(
        description="the claim's place in the paper, or what it checks of this artifact"
    )
    kind: Kind
    paper: str | None = Field(
        default=None,
        min_length=1,
        description="arXiv number, or another name; none for a claim about this artifact",
    )
    experiment: str = Field(description="what it takes to try it: an entry of experiments.yaml")
    reported: tuple[Reported, ...] = Field(default=(), description="none for what no paper reports")
    reported_as: Literal["printed", "ratio", "gain"] = Field(
        default="printed",
        description="how the rows become a number in `unit`: as it is, the second over the first, "
        "or a gain in percent as a factor",
    )
    evidence: Evidence = "measured"
    ours: Query | None = None
    per: Query | None = Field(default=None, description="what `ours` is divided by")
    divided_by: float = Field(default=1, description="what turns our value into `unit`")
    expects: Wanted | None = Field(
        default=None, description="the runs of the suites that must have ended ok; {}: all of them"
    )
    is_fit: bool = Field(
        default=False,
        description="constants, or the rates of the links, were fitted to this number",
    )
    unit: str = ""
    relation: Relation | None = None
    target: float | None = None
    tolerance: float = Field(default=0, description="how far from the target still passes")
    not_run: str = Field(default="", description="why it cannot be tried here")
    headline: str = Field(default="", description="its name in README's table, if it is listed there")
    badge: str = Field(default="", description="its words in the sentence about the badge Reproduced")

    @property
    def queries(self) -> list[Query]:
        """The claim's queries of tables: one, or a value's and its divisor's."""
        return [query for query in (self.ours, self.per) if query is not None]

    @model_validator(mode="after")
    def _gradable(self) -> "Claim":
        stated = [self.ours is not None, self.relation is not None, self.target is not None]
        if self.not_run and any(stated):
            raise ValueError("a claim with not_run has no ours, relation or target")
        if not self.not_run and not all(stated):
            raise ValueError("a claim has ours, relation and target, or states why it is not_run")
        if (self.kind == "artifact") != (self.paper is None):
            raise ValueError("a claim names a paper, or its kind is artifact")
        if any(query.is_of_runs for query in self.queries) != (self.expects is not None):
            raise ValueError("a claim on a table of runs, and no other, has expects: the runs it needs")
        return self


def read_claims(path: Path) -> list[Claim]:
    """The claims, in the order of KINDS. Raises UserError for an entry that does not fit."""
    claims: list[Claim] = list(read_entries(Claim, path, "id").values())
    experiments = read_experiments(path.parent)
    for claim in claims:
        if claim.experiment not in experiments:
            raise UserError(
                f"no experiment '{claim.experiment}'", where=f"{path}: {claim.id}", allowed=experiments
            )
    return sorted(claims, key=lambda claim: list(KINDS).index(claim.kind))


def sources(claim: Claim) -> list[str]:
    """The tables that the claim is graded on."""
    return list(dict.fromkeys(query.table for query in claim.queries))
