"""Graded claims -> artifact appendices in LaTeX: SC (AD/AE), EuroSys (also OSDI), cTuning (MLSys, ASPLOS).

Templates are in this folder; every value filled in is escaped. Each appendix inputs claims.tex.
"""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
from jinja2 import Environment, FileSystemLoader, StrictUndefined

from lowband.report.claim_latex import latex, latex_text
from lowband.report.claim_views import minutes, must_be, ours, read_graded, reported, rows_from
from lowband.report.experiments import Experiment, read_experiments
from lowband.report.needs import disk
from lowband.spec.files import write_whole

APPENDICES = ("sc", "eurosys", "ctuning")

_FOLDER = Path(__file__).parent


@dataclass(frozen=True)
class Line:
    """A claim for an appendix. number: its position in the graded table, from C1."""

    number: int
    sentence: str
    element: str
    reported: str
    ours: str
    must_be: str
    verdict: str
    evidence: str


@dataclass(frozen=True)
class Part:
    """An experiment and the claims that it tests. number: from E1 (A1 in SC's terms).

    memory_gib: memory of its largest shipped run, rounded up; empty if none was measured
    """

    number: int
    experiment: Experiment
    human_minutes: str
    machine_minutes: str
    memory_gib: str
    claims: list[Line]


def write_appendices(claims_csv: Path, config: Path, out: Path) -> None:
    """<appendix>.tex for each of APPENDICES, and claims.tex, in `out`."""
    claims = read_graded(claims_csv)
    parts = _parts(claims, config)
    environment = Environment(
        loader=FileSystemLoader(_FOLDER),
        block_start_string="<%", block_end_string="%>", variable_start_string="<<", variable_end_string=">>",
        comment_start_string="<#", comment_end_string="#>",
        trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True,
        undefined=StrictUndefined, finalize=latex_text, autoescape=False,
    )  # fmt: skip
    told = {"parts": [part for part in parts if part.experiment.command], "disk": disk(config.parent)}
    for name in APPENDICES:
        write_whole(out / f"{name}.tex", environment.get_template(f"{name}.tex.j2").render(told))
    write_whole(out / "claims.tex", "\n".join(latex(claims)) + "\n")


def _parts(claims: pd.DataFrame, config: Path) -> list[Part]:
    numbered = claims.assign(number=range(1, len(claims) + 1)).fillna(
        {"provenance": "", "origin": "", "unit": ""}
    )
    experiments = read_experiments(config)
    return [
        Part(
            number,
            experiments[name],
            minutes(rows["human_minutes"].iloc[0]),
            minutes(rows["machine_minutes"].iloc[0]),
            _whole(experiments[name].memory_gib(config)),
            [_line(row) for _, row in rows.iterrows()],
        )
        for number, name in enumerate(experiments, start=1)
        if len(rows := numbered[numbered["experiment"] == name])
    ]


def _whole(value: float | None) -> str:
    return "" if value is None else f"{math.ceil(value)}"


def _line(claim: "pd.Series[Any]") -> Line:
    return Line(
        number=claim["number"],
        sentence=claim["sentence"],
        element=claim["paper_element"],
        reported=reported(claim),
        ours=f"{ours(claim)} {claim['unit']}".strip(),
        must_be=must_be(claim),
        verdict=claim["verdict"],
        evidence=rows_from(claim) if claim["origin"] else "nothing was tried",
    )
