"""What a reviewer asks first: a sentence for each badge of an artifact, and what the artifact contributes.

The verdicts are those of the graded claims. A claim counts for the badge Reproduced if claims.yaml gives it
words for it (`badge`). Contributions are entries of config/contributions.yaml.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd
from pydantic import Field

from lowband.errors import UserError
from lowband.evidence.report.claim_views import ours, tally
from lowband.spec.plain_data import read_yaml
from lowband.spec.yaml_model import Strict, read_entries

WHY = (
    "nothing here ran on Frontier, and the core paper's batch, accumulation, overlap and link rates are not "
    "in its public text"
)
_WORDS = {"met": "met", "not met": "not met", "partial": "met in part", "fit": "fits", "not run": "not tried"}


class Badge(NamedTuple):
    """A badge of ACM's artifact review: its name, whether this artifact asks for it, and the reason."""

    name: str
    state: str
    reason: str

    @property
    def sentence(self) -> str:
        return f"{self.name}: {self.state}; {self.reason}."


class Contribution(Strict):
    """An entry of contributions.yaml."""

    id: str
    sentence: str
    claims: tuple[str, ...] = Field(min_length=1)


def badges(claims: pd.DataFrame, root: Path) -> list[Badge]:
    """Available, functional, reproduced. claims: a claims.csv; root: the folder that holds CITATION.cff"""
    doi = read_yaml(root / "CITATION.cff").get("doi")
    about_itself = claims[(claims["kind"] == "artifact") & (claims["verdict"] != "not run")]
    return [
        Badge(
            "Available",
            "yes" if doi else "not yet",
            f"archived as doi:{doi}" if doi else "the repository is open (Apache-2.0), but has no DOI",
        ),
        Badge(
            "Functional",
            "yes",
            "`make smoke` goes from suites to graded claims on nine small runs, `make figures` redraws every "
            f"table and figure; claims about the artifact itself: {tally(about_itself)}",
        ),
        Badge("Reproduced", _how_far(claims), f"{_by_verdict(claims)}; because {WHY}"),
    ]


def one_line(claims: pd.DataFrame, root: Path) -> str:
    """The badges in a line: states, and for the last one which relations and which numbers are not met."""
    available, functional, reproduced = badges(claims, root)
    relations = claims[(claims["kind"] == "relation") & (claims["verdict"] != "not run")]
    met = int((relations["verdict"] == "met").sum())
    missed = [claim for _, claim in _counted(claims) if claim["verdict"] == "not met"]
    of_relations = [str(claim["badge"]) for claim in missed if claim["kind"] == "relation"]
    of_numbers = [str(claim["badge"]) for claim in missed if claim["kind"] != "relation"]
    return (
        f"Badges: available: {available.state}; functional: {functional.state}; "
        f"reproduced: {reproduced.state}: {met} of {len(relations)} relations tried are met"
        f"{_listed('; relations not met: ', of_relations)}{_listed('; numbers not met: ', of_numbers)} "
        "([why](docs/claims.md#badges))."
    )


def _listed(words: str, missed: list[str]) -> str:
    return f"{words}{', '.join(missed)}" if missed else ""


def contributions(claims: pd.DataFrame, config: Path) -> list[dict[str, Any]]:
    """Each contribution with its number, verdicts and rows of `claims`.

    config: the folder of contributions.yaml. Raises UserError for an unknown claim.
    """
    path = config / "contributions.yaml"
    rows = claims.set_index("id", drop=False)
    found = []
    for number, entry in enumerate(read_entries(Contribution, path, "id").values(), start=1):
        if unknown := [name for name in entry.claims if name not in rows.index]:
            raise UserError(
                f"no claim '{unknown[0]}'", where=f"{path}: {entry.id}", allowed="ids of claims.yaml"
            )
        mine = rows.loc[list(entry.claims)]
        found.append({"number": number, "sentence": entry.sentence, "verdicts": tally(mine), "claims": mine})
    return found


def contribution_table(claims: pd.DataFrame, config: Path) -> pd.DataFrame:
    """A row per contribution as text, with the experiments that decide it."""
    return pd.DataFrame(
        {
            "": str(each["number"]), "contribution": each["sentence"], "verdicts": each["verdicts"],
            "experiments": ", ".join(each["claims"]["experiment"].unique()),
        }
        for each in contributions(claims, config)
    )  # fmt: skip


def _counted(claims: pd.DataFrame) -> Iterable[tuple[Any, "pd.Series[Any]"]]:
    return claims[claims["badge"].notna()].iterrows()


def _how_far(claims: pd.DataFrame) -> str:
    verdicts = {claim["verdict"] for _, claim in _counted(claims)}
    if verdicts == {"met"}:
        return "yes"
    return "in part" if "met" in verdicts else "no"


def _by_verdict(claims: pd.DataFrame) -> str:
    """The claims that count, in their own words, by verdict; what was not met with our value."""
    parts = []
    for verdict, words in _WORDS.items():
        mine = [claim for _, claim in _counted(claims) if claim["verdict"] == verdict]
        named = [
            str(claim["badge"]) + (f" (here {ours(claim)})" if verdict == "not met" else "") for claim in mine
        ]
        if named:
            parts.append(f"{words}: {', '.join(named)}")
    return "; ".join(parts)
