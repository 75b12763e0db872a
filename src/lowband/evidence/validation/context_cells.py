"""Ten cells in which the predictor names the best way along context, drawn before any of them is measured.

A cell is a model, a length, a number of sequences, and a rate of the slow link between two nodes of 4 ranks
(slurm/context-box). All 8 ranks lie along context; models have fewer heads than that, or linear layers, or
both kinds; beside softmax, states are scanned. Each possible way is predicted as the box will run it
(validation/scale_model.py). Eligible are cells whose second way takes 10 to 100 % longer than the best one,
in steps of 2 to 30 seconds. They are drawn with a fixed seed, so many of each kind of layers. Measured are
the ways of each cell that are predicted to take up to twice as long as its best.

The suite `box-context` is what is written here, and a test compares the two. A cell is right if the way that
is predicted to be the fastest is (table `context_ways`).
"""

import random
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd

from lowband.errors import UserError
from lowband.evidence.validation.scale_model import box_step_s
from lowband.predict.workload import ALL_WAYS, in_ways
from lowband.spec.axes import States, Ways
from lowband.spec.config import Config
from lowband.spec.suites import Suite, expand

SUITE, CLUSTER, RANKS, SEED = "box-context", "context-box", 8, 36
KINDS = {"softmax": 4, "both": 3, "linear": 3}  # how many cells are drawn of each
MODELS = {
    "gpt-200k-2-heads": "softmax", "gpt-200k-4-heads": "softmax", "gpt-200k-hybrid": "both",
    "gpt-200k-states": "linear",
}  # fmt: skip
LENGTHS, SEQUENCES, OUTER_LINKS = (128, 256, 512, 1024), (2, 8, 32), (1.0, 0.25, 0.0625)
NEXT, SECONDS, TRIED = (1.1, 2.0), (2.0, 30.0), 2.0
FIXED: dict[str, Any] = {
    "scheme": "ddp", "ranks": RANKS, "context": RANKS, "steps": 4, "warmup_steps": 1,
    "compute_dtype": "bf16", "reduce_dtype": "bf16", "time_limit_s": 1800, "peer_timeout_s": 600,
}  # fmt: skip
Options = dict[str, Any]


class Way(NamedTuple):
    """One way of a cell. options: of its run, beside FIXED; step_s: predicted in the box"""

    options: Options
    step_s: float


def candidates(config: Config) -> Iterator[tuple[str, list[Way]]]:
    """Every cell: its model's kind, and its ways, fastest first."""
    for model, seq_len, micro_batch, outer_link in product(MODELS, LENGTHS, SEQUENCES, OUTER_LINKS):
        cell = {"model": model, "seq_len": seq_len, "micro_batch": micro_batch, "outer_link": outer_link}
        yield MODELS[model], sorted(_ways(config, cell), key=lambda way: way.step_s)


def _ways(config: Config, cell: Options) -> Iterator[Way]:
    machine, model = config.machine(CLUSTER), config.model(cell["model"])
    states: list[States] = ["scan"] if 0 < model.linear_layers < model.layers else []
    for axes in in_ways(machine, model, RANKS, Ways.of_options(cp=RANKS), [ALL_WAYS], states):
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
    of_kind: dict[str, list[list[Way]]] = {kind: [] for kind in KINDS}
    for kind, ways in candidates(config):
        if is_eligible(ways):
            of_kind[kind].append(ways)
    generator = random.Random(SEED)
    return [ways for kind, count in KINDS.items() for ways in generator.sample(of_kind[kind], count)]


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
