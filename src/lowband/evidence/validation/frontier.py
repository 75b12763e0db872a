"""arXiv 2501.04266: ratios of TFLOPS per GCD at 384 GCDs, and scaling efficiency, of the 20B model.

The model's shape, batch, sequence, recomputation and overlap are not in the available material. `at_point`
has our choice; `frontier_maps.frontier_map` shows in which region around it the ratios hold.
"""

from typing import Any

import pandas as pd

from lowband.cost.numbers import Num
from lowband.evidence.validation import Rows, Setting
from lowband.predict.prediction import speed
from lowband.predict.workload import Workload

MODEL, SIZE, RANKS, BASE_RANKS = "gpt-20b", "20B", 384, 8
MICRO_BATCH, ACCUMULATION, SEQ_LEN = 1, 4, 2048  # with full recomputation and a fused attention
NOTE = "micro-batch 1, accumulation 4, sequence 2048, full recomputation: ours; not stated by the paper"


def at_point(setting: Setting, scheme: str, ranks: int = RANKS) -> Workload:
    """The job with our choice of the settings that the paper leaves out."""
    return setting.job(setting.model(MODEL), scheme, ranks, MICRO_BATCH, SEQ_LEN, accumulation=ACCUMULATION)


def where(setting: Setting) -> Any:
    def published(metric: str, baseline: str) -> float:
        df = setting.reported
        [value] = df.loc[(df["metric"] == metric) & (df["baseline"] == baseline), "value"].unique()
        return float(value)

    zeropp = 1 + published("TFLOPS per GPU gain", "ZeRO-3") / 100
    hier3 = 1 + published("TFLOPS per GPU gain", "ZeRO++") / 100
    both = 1 + published("TFLOPS per GPU gain, maximum", "ZeRO-3 (inferred)") / 100
    efficiency = published("scaling efficiency", "")
    at, from_base = f"{RANKS} GPUs", f"{BASE_RANKS} to {RANKS} GPUs"
    base = f"{NOTE}; base {BASE_RANKS} GCDs, with the same batch per GCD: ours"
    return pd.DataFrame(
        [
            ("ZeRO++ / ZeRO-3", "ratio", zeropp, ("zeropp", RANKS), ("zero3", RANKS), at, NOTE),
            ("hier3 / ZeRO++", "ratio", hier3, ("hier3", RANKS), ("zeropp", RANKS), at, NOTE),
            ("hier3 / ZeRO-3", "ratio", both, ("hier3", RANKS), ("zero3", RANKS), at, NOTE),
            ("hier3 efficiency", "efficiency", efficiency, ("hier3", RANKS), ("hier3", BASE_RANKS), from_base,
             base),
        ],
        columns=["name", "quantity", "value", "one", "other", "scale", "note"],
    )  # fmt: skip


def jobs(setting: Setting, row: Any) -> tuple[Workload, Workload]:
    return at_point(setting, *row.one), at_point(setting, *row.other)


def ratio(jobs: tuple[Workload, Workload]) -> Num:
    one, other = (speed(job).tflops_per_gpu for job in jobs)
    return one / other


ROWS = Rows(
    where=where, job=jobs, of=ratio,
    id="frontier: {name}", quantity="{quantity}", size=SIZE, scale="{scale}", note="{note}",
)  # fmt: skip
