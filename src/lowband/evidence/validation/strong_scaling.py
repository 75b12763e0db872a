"""What-if as a table: models of arXiv 2312.12705 on more and more GCDs of Frontier, with one global batch.

Degrees and batch are those of the first author's scripts (dash.py); ranks along data grow. The abstract has a
strong scaling efficiency of each model, without its batch and GCDs: it stands beside, and grades nothing.
"""

from dataclasses import replace

import pandas as pd

from lowband.cost.numbers import GIB
from lowband.evidence.validation import SOURCES
from lowband.evidence.validation.dash import job, where
from lowband.predict.prediction import predict
from lowband.spec.config import Config
from lowband.spec.step import Schedule

SCHEDULES: dict[str, list[tuple[Schedule, int]]] = {
    "175B": [("1f1b", 1), ("1f1b", 2), ("zb-h1", 1), ("zb-v", 2)],
    "1T": [("1f1b", 1)],  # one layer a stage; 128 stages of a split schedule take long to simulate
}
DATA = (1, 2, 4, 8, 16)


def strong_scaling(config: Config) -> pd.DataFrame:
    """A row for each model, schedule and number of GCDs.

    efficiency: TFLOPS per GCD over those on the fewest GCDs; `reported_efficiency`: as printed
    """
    setting = SOURCES["dash"].setting(config)
    printed = setting.reported
    printed = printed[printed["metric"] == "strong scaling efficiency"].set_index("model")["value"]
    found = []
    for row in where(setting).itertuples():
        for schedule, chunks in SCHEDULES.get(str(row.model), []):
            for data in DATA:
                one = job(setting, row)
                batch = int(one.accumulation * one.micro_batch * one.levels.world)
                axes = one.axes.model_copy(update={"schedule": schedule, "chunks": chunks})
                ranks = axes.tensor * axes.pipeline * data
                p = predict(replace(one, axes=axes, ranks=ranks, accumulation=batch // data), interval=False)
                found.append(
                    {
                        **setting.names,
                        "model": row.model,
                        "schedule": axes.row,
                        "ranks": ranks,
                        "global_batch": batch,
                        "tflops_per_gpu": float(p.tflops_per_gpu),
                        "bubble": float(p.time_s["bubble"] / p.step_time_s),
                        "peak_gib": float(p.peak_memory_bytes) / GIB,
                        "fits": bool(p.fits),
                        "reported_efficiency": float(printed[row.model]),
                    }
                )
    df = pd.DataFrame(found)
    fewest = df.groupby(["model", "schedule"], sort=False)["tflops_per_gpu"].transform("first")
    return df.assign(efficiency=100 * df["tflops_per_gpu"] / fewest)
