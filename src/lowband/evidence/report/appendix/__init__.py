"""Graded claims -> artifact appendices in LaTeX: SC (AD/AE), EuroSys (also OSDI), cTuning (MLSys, ASPLOS).

Of the claims they have those of the contributions; the rest are in claims.csv. Templates are in this folder;
every value filled in is escaped.
"""

import math
from pathlib import Path
from typing import Any

import pandas as pd
from jinja2 import Environment, FileSystemLoader, StrictUndefined

from lowband.evidence.claims.experiments import Experiment, read_experiments
from lowband.evidence.report.badges import badges, contributions
from lowband.evidence.report.claim_views import minutes, must_be, ours, read_graded
from lowband.evidence.report.needs import disk
from lowband.evidence.report.writers import latex_code, latex_text
from lowband.spec.files import write_whole

APPENDICES = ("sc", "eurosys", "ctuning")


class _Set(str):
    """LaTeX already: not escaped again."""


def write_appendices(claims_csv: Path, config: Path, out: Path) -> None:
    """<appendix>.tex for each of APPENDICES in `out`. config: the folder of contributions.yaml"""
    claims = read_graded(claims_csv)
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        block_start_string="<%", block_end_string="%>", variable_start_string="<<", variable_end_string=">>",
        comment_start_string="<#", comment_end_string="#>",
        trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True,
        undefined=StrictUndefined, finalize=_escaped, autoescape=False,
    )  # fmt: skip
    environment.filters["code"] = lambda text: _Set(latex_code(text))
    found = contributions(claims, config)
    tried = {experiment for each in found for experiment in each["claims"]["experiment"]}
    parts = [
        _part(number, experiment, config)
        for number, experiment in enumerate(
            (each for each in read_experiments(config).values() if each.id in tried), start=1
        )
    ]
    number_of = {part["experiment"].id: part["number"] for part in parts}
    for each in found:
        each["lines"] = [_line(row, number_of) for _, row in each.pop("claims").iterrows()]
        each["parts"] = sorted({line["part"] for line in each["lines"]})
    values = {
        "badges": badges(claims, config.parent), "contributions": found, "parts": parts,
        "disk": disk(config.parent),
    }  # fmt: skip
    for name in APPENDICES:
        write_whole(out / f"{name}.tex", environment.get_template(f"{name}.tex.j2").render(values))


def _escaped(value: object) -> str:
    return value if isinstance(value, _Set) else latex_text(value)


def _part(number: int, experiment: Experiment, config: Path) -> dict[str, Any]:
    """An experiment that tries a contribution. number: from E1"""
    memory_gib = experiment.memory_gib(config)
    return {
        "number": number,
        "experiment": experiment,
        "human_minutes": minutes(experiment.human_minutes),
        "machine_minutes": minutes(experiment.minutes(config)),
        "memory_gib": "" if memory_gib is None else f"{math.ceil(memory_gib)}",
    }


def _line(claim: "pd.Series[Any]", number_of: dict[str, int]) -> dict[str, Any]:
    """A claim of a contribution, for a row of a table."""
    return {
        "short": claim["short"],
        "part": number_of[claim["experiment"]],
        "ours": ours(claim),
        "must_be": must_be(claim),
        "verdict": claim["verdict"],
    }
