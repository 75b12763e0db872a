"""arXiv 2501.04266: ratios of TFLOPS per GCD at 384 GCDs, and scaling efficiency, of the 20B model.

The model's shape, batch, sequence, recomputation and overlap are not in the available material. `at_point`
has our choice; `frontier_maps.frontier_map` shows in which region around it the ratios hold.
"""

from lowband.cost.numbers import Num
from lowband.evidence.validation import PublishedRow, Setting, ranks_name
from lowband.predict.prediction import speed
from lowband.predict.workload import Workload

MODEL, SIZE, RANKS, BASE_RANKS = "gpt-20b", "20B", 384, 8
MICRO_BATCH, ACCUMULATION, SEQ_LEN = 1, 4, 2048  # with full recomputation and a fused attention
NOTE = "micro-batch 1, accumulation 4, sequence 2048, full recomputation: ours; not stated by the paper"


def tflops(setting: Setting, scheme: str, ranks: int = RANKS) -> Num:
    """Model TFLOPS per GCD at our point (`at_point`)."""
    return speed(at_point(setting, scheme, ranks)).tflops_per_gpu


def at_point(setting: Setting, scheme: str, ranks: int = RANKS) -> Workload:
    """The job with our choice of the settings that the paper leaves out."""
    return Workload(
        setting.machine,
        setting.stack,
        setting.model(MODEL),
        setting.scheme(scheme),
        ranks,
        MICRO_BATCH,
        SEQ_LEN,
        ACCUMULATION,
    )


def rows(setting: Setting) -> list[PublishedRow]:
    def published(metric: str, baseline: str) -> float:
        df = setting.reported
        [value] = df.loc[(df["metric"] == metric) & (df["baseline"] == baseline), "value"].unique()
        return float(value)

    zeropp = 1 + published("TFLOPS per GPU gain", "ZeRO-3") / 100
    hier3 = 1 + published("TFLOPS per GPU gain", "ZeRO++") / 100
    both = 1 + published("TFLOPS per GPU gain, maximum", "ZeRO-3 (inferred)") / 100

    def ratio(a: str, b: str) -> Num:
        return tflops(setting, a) / tflops(setting, b)

    def ratio_row(a: str, b: str, published: float) -> PublishedRow:
        schemes = {"zero3": "ZeRO-3", "zeropp": "ZeRO++", "hier3": "hier3"}
        return PublishedRow(
            f"frontier: {schemes[a]} / {schemes[b]}", "ratio", published, lambda: ratio(a, b), SIZE,
            ranks_name(RANKS), NOTE,
        )  # fmt: skip

    return [
        ratio_row("zeropp", "zero3", zeropp),
        ratio_row("hier3", "zeropp", hier3),
        ratio_row("hier3", "zero3", both),
        PublishedRow(
            "frontier: hier3 efficiency",
            "efficiency",
            published("scaling efficiency", ""),
            lambda: tflops(setting, "hier3") / tflops(setting, "hier3", BASE_RANKS),
            SIZE,
            f"{BASE_RANKS} to {ranks_name(RANKS)}",
            f"{NOTE}; base {BASE_RANKS} GCDs, with the same batch per GCD: ours",
        ),
    ]
