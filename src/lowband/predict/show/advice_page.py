"""`lowband advise-page`: the answers for many jobs as one HTML page, looked up in the browser."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

from lowband.errors import UserError
from lowband.predict.request import setting
from lowband.predict.search.advice import MICRO_BATCHES, RECOMPUTE, Advisor, placed_schemes, split
from lowband.predict.show.advice_text import HEADINGS, answers
from lowband.predict.workload import Workload
from lowband.spec.config import Config

TEMPLATE = Path(__file__).with_name("advice.html")
TABLE = "/* the table */ null"  # where the template takes it


@dataclass(frozen=True)
class Axes:
    """What a reader of the page chooses from. seq: tokens of a sequence, or the model's longest if shorter"""

    clusters: Sequence[str]
    models: Sequence[str]
    gpus: Sequence[int]
    schemes: Sequence[str]
    seq: int
    stack: str | None = None


def page(config: Config, axes: Axes) -> str:
    """The page, with nothing to fetch. Raises UserError for unknown names, or if no job is possible."""
    strings: dict[str, int] = {}

    def number(text: str) -> int:
        return strings.setdefault(text, len(strings))

    points = [None if found is None else _packed(found, number) for found in _points(config, axes)]
    if not any(points):
        raise UserError("no job is possible on these machines", allowed="other --gpus, --scheme or --model")
    table = {
        "axes": {
            "machine": list(axes.clusters), "model": list(axes.models), "gpus": list(axes.gpus),
            "scheme": list(axes.schemes), "recompute": list(RECOMPUTE), "batch": list(MICRO_BATCHES),
        },
        "headings": list(HEADINGS.values()),
        "points": points,
        "strings": list(strings),
    }  # fmt: skip
    packed = json.dumps(table, separators=(",", ":")).replace("</", "<\\/")
    return TEMPLATE.read_text(encoding="utf-8").replace(TABLE, packed)


def _packed(found: dict[str, Any], number: Any) -> list[Any]:
    """Every text of an answer as its place among the page's strings."""
    ranks = found["ranks_that_fit"]
    more = f"it fits unchanged on {ranks} GPUs" if ranks else ""
    lines = [
        *found["question"],
        *found["answer"].values(),
        found["of_a_step"],
        found["heading"],
        more,
        found["stands_on"],
    ]
    return [
        [number(line) for line in lines],
        [[number(cell) for cell in one.values()] for one in found["changes"]],
    ]


def _points(config: Config, axes: Axes) -> Iterator[dict[str, Any] | None]:
    """The answers for each combination of the axes, the last varying fastest; None: an impossible job."""
    schemes = [config.given_scheme(name) for name in axes.schemes]
    settings = [setting(config, cluster, axes.stack) for cluster in axes.clusters]
    models = [config.given_model(name) for name in axes.models]
    batches = sorted({(b, split(m, 1, b)) for m in MICRO_BATCHES for b in MICRO_BATCHES})
    for (machine, stack), model, ranks in product(settings, models, axes.gpus):
        first = None
        for scheme in schemes:
            try:
                placed, seq = scheme.on(list(machine.sizes)), min(axes.seq, model.seq_len)
                job = Workload(machine, stack, model, placed, ranks, 1, seq)
            except UserError:
                continue
            first = job if first is None else first
        advisor = None if first is None else Advisor(first, placed_schemes(first, schemes), batches)
        for name, recompute, batch in product(axes.schemes, RECOMPUTE, MICRO_BATCHES):
            if first is None or advisor is None or name not in advisor.schemes:
                yield None
                continue
            job = replace(first, scheme=advisor.schemes[name], recompute=recompute, micro_batch=batch)
            yield answers(advisor, job, (name, recompute, batch, 1))
