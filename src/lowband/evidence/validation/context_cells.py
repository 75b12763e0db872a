"""Ten cells in which the predictor names the best way along context, drawn before any of them is measured.

A cell is a model, a length, a number of sequences, recomputation or none, and a rate of the slow link between
two nodes of 4 ranks (slurm/context-box). All 8 ranks lie along context; models have fewer heads than that, or
linear layers, or both kinds; beside softmax, states are scanned. Tried are ring, gather, and heads on as many
levels, from the inside, as heads can be divided over, with either outside; of states all three ways. Each way
is predicted as the box will run it (validation/scale_model.py). Eligible are cells whose second way takes 10
to 100 % longer than the best one, in steps of 4 to 25 seconds. They are drawn with a fixed seed, in turn from
those of each best way. Measured are the ways that are predicted to take up to twice as long as the best.

The suite `box-context` is what is written here, and a test compares the two. A cell is right if the way that
is predicted to be the fastest is (table `context_ways`).
"""

import random
from collections.abc import Iterator
from itertools import product, zip_longest
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd
import yaml

from lowband.errors import UserError
from lowband.evidence.validation.scale_model import box_step_s
from lowband.predict.context_ways import ALL_WAYS, in_ways
from lowband.spec.axes import Ways
from lowband.spec.config import Config
from lowband.spec.step import States
from lowband.spec.suites import Suite, expand

SUITE, CLUSTER, RANKS, CELLS, SEED = "box-context", "context-box", 8, 10, 36
MODELS = "gpt-200k-2-heads", "gpt-200k-4-heads", "gpt-200k-hybrid", "gpt-200k-states"
VARIED: dict[str, tuple[Any, ...]] = {
    "model": MODELS, "seq_len": (128, 256, 512, 1024, 2048), "micro_batch": (1, 4, 16),
    "recompute": ("none", "full"), "outer_link": (4.0, 1.0, 0.25),
}  # fmt: skip
WAYS = (
    "ring", "gather", "package=heads,node=ring,world=ring", "package=heads,node=gather,world=gather",
    "package=heads,node=heads,world=ring", "package=heads,node=heads,world=gather",
)  # fmt: skip
HEADS = {2: 1, 4: 2}  # levels, from the inside, over which so many heads can be divided
NEXT, SECONDS, TRIED = (1.1, 2.0), (4.0, 25.0), 2.0
FIXED: dict[str, Any] = {
    "scheme": "ddp", "ranks": RANKS, "context": RANKS, "steps": 4, "warmup_steps": 1,
    "compute_dtype": "bf16", "reduce_dtype": "bf16", "time_limit_s": 1800, "peer_timeout_s": 600,
}  # fmt: skip
HEADING = """\
# Ten cells, drawn with a fixed seed before any of them was measured; `lowband validate --cells` writes this
# file (evidence/validation/context_cells.py). They run without Slurm, on their own links.
"""
Options = dict[str, Any]


class Way(NamedTuple):
    """One way of a cell. options: of its run, beside FIXED; step_s: predicted in the box"""

    options: Options
    step_s: float


def candidates(config: Config) -> Iterator[list[Way]]:
    """The ways of every cell, fastest first."""
    for values in product(*VARIED.values()):
        cell = dict(zip(VARIED, values, strict=True))
        yield sorted(_ways(config, cell), key=lambda way: way.step_s)


def _ways(config: Config, cell: Options) -> Iterator[Way]:
    machine, model = config.machine(CLUSTER), config.model(cell["model"])
    is_linear = model.linear_layers == model.layers
    states: list[States] = [] if is_linear or not model.linear_layers else ["scan"]
    tried = (
        [ALL_WAYS] if is_linear else [way for way in WAYS if way.count("heads") in (0, HEADS[model.heads])]
    )
    for axes in in_ways(machine, model, RANKS, Ways.of_options(cp=RANKS), tried, states):
        along = {"context_attention": axes.context_attention, "context_states": axes.context_states}
        options = {**cell, **along, "zigzag": axes.zigzag}
        suite = Suite(name=SUITE, purpose="one way", cluster=CLUSTER, fixed={**FIXED, **options})
        try:
            [spec] = expand(suite, machine, config.model, config.scheme, Path(SUITE))
        except UserError:  # heads that cannot be divided
            continue
        step_s = box_step_s(spec)
        assert step_s is not None
        yield Way(options, step_s)


def is_eligible(ways: list[Way]) -> bool:
    best, second = ways[0].step_s, ways[1].step_s
    return NEXT[0] <= second / best <= NEXT[1] and SECONDS[0] <= best <= SECONDS[1]


def drawn(config: Config) -> list[list[Way]]:
    """The ways of each drawn cell, fastest first, with those that are not measured."""
    by_best: dict[tuple[str, str], list[list[Way]]] = {}
    for ways in candidates(config):
        if is_eligible(ways):
            best = ways[0].options
            by_best.setdefault((best["context_attention"], best["context_states"]), []).append(ways)
    generator = random.Random(SEED)
    shuffled = [generator.sample(cells, len(cells)) for _, cells in sorted(by_best.items())]
    in_turn = [cell for cells in zip_longest(*shuffled) for cell in cells if cell is not None]
    return in_turn[:CELLS]


def tried(ways: list[Way]) -> list[Way]:
    """Those that are measured."""
    return [way for way in ways if way.step_s <= TRIED * ways[0].step_s]


def suite(cells: list[list[Way]]) -> Options:
    """What is in config/suites/box-context.yaml."""
    return {
        "purpose": "is the way along context that is predicted to be fastest so: ten cells drawn beforehand",
        "cluster": CLUSTER,
        "fixed": FIXED,
        "cells": [way.options for ways in cells for way in tried(ways)],
    }


def text(cells: list[list[Way]]) -> str:
    """That file, whole."""
    return HEADING + yaml.safe_dump(suite(cells), sort_keys=False, width=110)


def table(cells: list[list[Way]]) -> pd.DataFrame:
    """A row per cell and way: predicted seconds of a step, its place among the cell's ways."""
    return pd.DataFrame(
        {
            "provenance": "predicted", "cell": number, **way.options, "place": place, "step_s": way.step_s,
            "over_best": way.step_s / ways[0].step_s, "is_measured": way in tried(ways),
        }
        for number, ways in enumerate(cells, start=1)
        for place, way in enumerate(ways, start=1)
    )  # fmt: skip
