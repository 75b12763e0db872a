"""The longest sequence that fits N ranks, in each way along context, by the predictor's memory alone.

One sequence a step over all ranks; states sharded over them (zero3), blocks recomputed, bf16. Way by way, as
all levels that the ranks cross attend; `state` is of the same model with linear layers in place of softmax.
logits: whole: all of a rank's are in memory; in pieces: next to none of them are, which shows the ways.
`tokens` is a multiple of 1,024 and of what the ranks divide; 0: even that does not fit.
"""

from itertools import product
from math import lcm
from typing import Any

import numpy as np
import pandas as pd

from lowband.cost.numbers import GIB
from lowband.errors import UserError
from lowband.predict.footprint import memory_items, peak_bytes
from lowband.predict.request import setting
from lowband.predict.workload import Workload
from lowband.spec.axes import Ways
from lowband.spec.config import Config
from lowband.spec.machine import Machine
from lowband.spec.mesh import WORLD
from lowband.spec.model import ModelSpec
from lowband.spec.sourced import Fact
from lowband.spec.stack import Stack

CLUSTERS, MODELS = ("dgx-h100", "frontier"), ("llama-3.2-1b", "llama-3-8b")
MIXED = "heads inside, ring outside"  # of nodes
WAYS = ("ring", "gather", "heads", MIXED, "state")
RANKS = (1, 2, 4, 8, 16, 32, 64)
STEP, MOST = 1024, 2**31  # tokens
TRIED = 130  # lengths at once


LOSSES = {"whole": {}, "in pieces": {"logit_bytes": Fact(value=0, source="a loss in pieces")}}


def longest(config: Config) -> pd.DataFrame:
    """A row per machine, model, way and number of ranks. refused: why ranks cannot attend so, else empty"""
    rows = []
    for cluster, loss in product(CLUSTERS, LOSSES):
        machine, stack = setting(config, cluster, "ours")
        stack = stack.model_copy(update=LOSSES[loss])
        for name in MODELS:
            for way in WAYS:
                model = config.model(name)
                if way == "state":
                    model = model.model_copy(update={"attention": "linear"})
                for ranks in RANKS:
                    rows.append({"logits": loss, **_row(config, machine, stack, model, way, ranks)})
    return pd.DataFrame(rows)


def _row(
    config: Config, machine: Machine, stack: Stack, model: ModelSpec, way: str, ranks: int
) -> dict[str, Any]:
    by_level = ",".join(f"{each.name}={'ring' if each.name == WORLD else 'heads'}" for each in machine.levels)
    along = {
        "context_attention": by_level if way == MIXED else way,
        "context_states": "scan" if way == "state" else "auto", "zigzag": way != "state",
    }  # fmt: skip
    axes = Ways.of_options(cp=ranks).model_copy(update=along)
    scheme = config.scheme("zero3").on([*machine.sizes])
    row = {
        "provenance": "predicted",
        "cluster": machine.name,
        "model": model.name,
        "way": way,
        "ranks": ranks,
    }
    try:
        probe = Workload(machine, stack, model, scheme, ranks, 1, STEP * 2 * ranks, axes=axes)
    except UserError as error:
        return {**row, "tokens": 0, "tokens_per_rank": 0.0, "refused": error.what}
    assert machine.device.memory_gib is not None
    room, unit = machine.device.memory_gib * GIB, lcm(STEP, probe.layout.multiple)

    fitting, too_many = 0, MOST // unit
    while too_many - fitting > 1:
        units = np.unique(np.linspace(fitting, too_many, TRIED).astype(int))[1:-1]
        job = Workload(machine, stack, model, scheme, ranks, 1, units * unit, axes=axes)
        fits = peak_bytes(memory_items(job), job.keeps_grads) <= room
        fitting, too_many = (
            int(units[fits].max(initial=fitting)),
            int(units[~np.asarray(fits)].min(initial=too_many)),
        )
    return {**row, "tokens": fitting * unit, "tokens_per_rank": fitting * unit / ranks, "refused": ""}
