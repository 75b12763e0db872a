"""Readings of the abstract of arXiv 2501.04266 beside hier3: what each sends, holds, needs for the ratios.

All keep its words: three levels of partitioning that follow the links between GCDs, between GPUs and between
nodes, and ZeRO++'s quantized collectives. They differ in the level of each state, and in what is quantized.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pandas as pd

from lowband.cost.bytes import sent_bytes, stage_numels
from lowband.evidence.validation import SOURCES, Setting
from lowband.evidence.validation.frontier import ACCUMULATION, RANKS, at_point
from lowband.evidence.validation.frontier_alternatives import ALTERNATIVES, published_ratios, row
from lowband.predict.prediction import predict
from lowband.spec.config import Config
from lowband.spec.scheme import Scheme

PASSES = (1, 2, ACCUMULATION)
BASELINES = ("zero3", "zeropp")
_WIRES: Mapping[str, str] = {"forward_gather": "int8", "grad_reduce": "int4", "boundary_reduce": "int4"}

# By name, the states' levels and wires of each reading but hier3, which is a scheme of config/schemes.yaml.
READINGS: Mapping[str, Mapping[str, str]] = {
    "hier3, INT8 update": {
        "weights": "package", "grads": "node", "optim": "world", **_WIRES, "backward_gather": "int8",
        "update_gather": "int8",
    },
    "secondary within the node": {
        "weights": "node", "secondary": "package", "grads": "node", "optim": "world", **_WIRES,
    },
    "secondary within the node, INT8 update": {
        "weights": "node", "secondary": "package", "grads": "node", "optim": "world", **_WIRES,
        "update_gather": "int8",
    },
    "ZeRO++, secondary in the package": {
        "weights": "world", "secondary": "package", "grads": "world", "optim": "world",
        "forward_gather": "int8", "grad_reduce": "int4",
    },
    "optimizer in the node": {
        "weights": "package", "grads": "node", "optim": "node", "forward_gather": "int8",
        "backward_gather": "int8", "grad_reduce": "int4",
    },
}  # fmt: skip
HIER3 = "hier3"


def schemes(config: Config) -> dict[str, Scheme]:
    """hier3 and the other readings, by name."""
    others = {name: Scheme.parse({"name": name, **states}, name) for name, states in READINGS.items()}
    return {HIER3: config.scheme(HIER3), **others}


def readings(config: Config) -> pd.DataFrame:
    """One row per reading and alternative of `frontier_alternatives`: what is free is fitted for the reading.

    ratio_hier3_...: of the reading
    nearest: the one of the reading's rows whose ratios are nearest to the paper's
    """
    setting, published = SOURCES["frontier"].setting(config), published_ratios(config)
    df = pd.DataFrame(
        {"reading": name, **row(setting, one, published, scheme)}
        for name, scheme in schemes(config).items()
        for one in ALTERNATIVES
        if one.hier3 == HIER3
    )
    df["nearest"] = df.index.isin(df.groupby("reading")["largest_error_percent"].idxmin())
    return df


def reading_costs(config: Config) -> pd.DataFrame:
    """Bytes that a rank sends over each level per step, at 20B on 384 GCDs hop by hop, and its memory.

    One row per reading, or baseline, and number of passes per step.
    """
    setting = SOURCES["frontier"].setting(config)
    baselines = {name: config.scheme(name) for name in BASELINES}
    return pd.DataFrame(
        _cost(setting, name, scheme, passes)
        for name, scheme in (baselines | schemes(config)).items()
        for passes in PASSES
    )


def _cost(setting: Setting, name: str, scheme: Scheme, passes: int) -> dict[str, Any]:
    job = replace(at_point(setting, HIER3), scheme=scheme, accumulation=passes)
    sent = sent_bytes(
        stage_numels(job.model, job.levels), scheme, job.levels, job.compute_dtype, job.stack.reduce_dtype,
        passes, is_clipped=True,
    )  # fmt: skip
    by_level = dict.fromkeys(job.levels.names[1:], 0.0)
    for (level, _, _), count in sent.items():
        by_level[level] += count
    found = predict(job, interval=False)
    return {
        "provenance": "predicted",
        "cluster": setting.machine.name,
        "ranks": RANKS,
        "reading": name,
        **{state: getattr(scheme, state) for state in ("weights", "secondary", "grads", "optim")},
        "passes": passes,
        **{f"{level}_bytes": count for level, count in by_level.items()},
        "peak_memory_bytes": float(found.peak_memory_bytes),
        "fits": bool(found.fits),
    }
