"""Graded claims -> artifact appendices in LaTeX: SC (AD/AE), EuroSys (also OSDI), cTuning (MLSys, ASPLOS).

Templates are in this folder; every value filled in is escaped. Each appendix inputs claims.tex.
"""

import math
from pathlib import Path
from typing import Any

import pandas as pd
from jinja2 import Environment, FileSystemLoader, StrictUndefined

from lowband.evidence.claims.experiments import read_experiments
from lowband.evidence.report.claim_views import claims_latex, minutes, must_be, ours, read_graded, rows_from
from lowband.evidence.report.needs import disk
from lowband.evidence.report.writers import latex_text
from lowband.spec.files import write_whole

APPENDICES = ("sc", "eurosys", "ctuning")


def write_appendices(claims_csv: Path, config: Path, out: Path) -> None:
    """<appendix>.tex for each of APPENDICES, and claims.tex, in `out`."""
    claims = read_graded(claims_csv)
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        block_start_string="<%", block_end_string="%>", variable_start_string="<<", variable_end_string=">>",
        comment_start_string="<#", comment_end_string="#>",
        trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True,
        undefined=StrictUndefined, finalize=latex_text, autoescape=False,
    )  # fmt: skip
    values = {"parts": _parts(claims, config), "disk": disk(config.parent)}
    for name in APPENDICES:
        write_whole(out / f"{name}.tex", environment.get_template(f"{name}.tex.j2").render(values))
    write_whole(out / "claims.tex", claims_latex(claims))


def _parts(claims: pd.DataFrame, config: Path) -> list[dict[str, Any]]:
    """Each experiment that can be run and has claims. number: from E1 (A1 in SC's terms)."""
    lines = [_line(number, row) for number, (_, row) in enumerate(claims.iterrows(), start=1)]
    parts = []
    for number, experiment in enumerate(read_experiments(config).values(), start=1):
        mine = [line for line in lines if line["experiment"] == experiment.id]
        memory_gib = experiment.memory_gib(config)
        if experiment.command and mine:
            part = {
                "number": number,
                "experiment": experiment,
                "human_minutes": minutes(experiment.human_minutes),
                "machine_minutes": minutes(experiment.minutes(config)),
                "memory_gib": "" if memory_gib is None else f"{math.ceil(memory_gib)}",
                "claims": mine,
            }
            parts.append(part)
    return parts


def _line(number: int, claim: "pd.Series[Any]") -> dict[str, Any]:
    """A claim for an appendix. number: its position in the graded table, from C1."""
    return {
        "number": number,
        "experiment": claim["experiment"],
        "sentence": claim["sentence"],
        "element": claim["paper_element"],
        "ours": " ".join(filter(None, (ours(claim), "" if pd.isna(claim["unit"]) else claim["unit"]))),
        "must_be": must_be(claim),
        "verdict": claim["verdict"],
        "evidence": "nothing was tried" if pd.isna(claim["origin"]) else rows_from(claim),
    }
