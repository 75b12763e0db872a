"""A what-if as a table: every placement and order at the Frontier point, throughput beside memory.

The candidates are those of `lowband plan` with the point's batches and recomputation, and neither tensor nor
pipeline parallelism. A row is a placement in one order with its fastest wires, or a scheme of
config/schemes.yaml with its own.
"""

from dataclasses import replace

import pandas as pd

from lowband.evidence.validation.frontier import ACCUMULATION, MICRO_BATCH, MODEL, RANKS, SEQ_LEN
from lowband.predict.prediction import predict
from lowband.predict.search.candidates import WIRES
from lowband.predict.search.plan import jobs
from lowband.predict.workload import Workload
from lowband.spec.axes import ONLY_DATA
from lowband.spec.config import Config
from lowband.spec.scheme import Scheme

CLUSTER = "frontier"
STACKS = ("deepspeed-zero", "ours")
STATES = ("weights", "secondary", "grads", "optim")
DIGITS = 9  # of TFLOPS; rates that agree in them differ by rounding alone


def pareto(config: Config) -> pd.DataFrame:
    """One row per placement and order on each stack.

    over_hier3_depth: throughput over that of hier3 in depth-first order
    pareto:           whether it fits, and none that takes as little memory is faster
    """
    parts = []
    for stack in STACKS:
        df = pd.DataFrame(_rows(config, stack))
        rate = df["tflops_per_gpu"].round(DIGITS)
        fastest = rate.groupby([df[key] for key in (*STATES, "order")], dropna=False).idxmax()
        df = df[df["scheme"].ne("") | df.index.isin(fastest)]
        [hier3] = df.loc[df["scheme"].eq("hier3") & df["order"].eq("depth"), "tflops_per_gpu"]
        parts.append(df.assign(over_hier3_depth=df["tflops_per_gpu"] / hier3, pareto=_pareto(df)))
    return pd.concat(parts, ignore_index=True)


def _rows(config: Config, stack: str) -> list[dict[str, object]]:
    machine, model = config.machine(CLUSTER), config.model(MODEL)
    schemes = [config.scheme(name) for name in reversed(list(config.schemes))]
    named = {_choices(scheme): scheme.name for scheme in schemes if scheme.sync is None}
    batch = MICRO_BATCH * ACCUMULATION * RANKS
    found = jobs(
        machine, config.given_stack(stack, machine), model, RANKS, SEQ_LEN, batch, [ONLY_DATA], [MICRO_BATCH],
        ["full"],
    )  # fmt: skip
    return [_row(job, named.get(_choices(job.scheme), "")) for job in found]


def _choices(scheme: Scheme) -> tuple[object, ...]:
    return tuple(getattr(scheme, name) for name in (*STATES, *WIRES))


def _row(job: Workload, name: str) -> dict[str, object]:
    p = predict(replace(job, micro_batch=MICRO_BATCH, accumulation=ACCUMULATION), interval=False)
    return {
        "provenance": "predicted",
        "cluster": job.machine.name,
        "stack": job.stack.name,
        "model": job.model.name,
        "ranks": job.ranks,
        "scheme": name,
        "order": job.order,
        **dict(zip((*STATES, *WIRES), _choices(job.scheme), strict=True)),
        "tflops_per_gpu": float(p.tflops_per_gpu),
        "peak_memory_bytes": float(p.peak_memory_bytes),
        "memory_gib": job.machine.device.memory_gib,
        "fits": bool(p.fits),
    }


def _pareto(df: pd.DataFrame) -> "pd.Series[bool]":
    slowness = -df["tflops_per_gpu"].round(DIGITS)
    by_memory = df.assign(slowness=slowness)[df["fits"]].sort_values(["peak_memory_bytes", "slowness"])
    least_before = by_memory["slowness"].cummin().shift(fill_value=0)
    return df.index.to_series().isin(by_memory.index[by_memory["slowness"] < least_before])
