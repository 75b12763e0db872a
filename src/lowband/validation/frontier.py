"""arXiv 2501.04266: ratios of TFLOPS per GCD at 384 GCDs, and scaling efficiency, of the 20B model.

The model's shape, batch, sequence, recomputation and overlap are not in the available material. `at_point`
has our choice; `frontier_maps.frontier_map` shows in which region around it the ratios hold.
"""

from lowband.predict.prediction import predict
from lowband.predict.workload import Workload
from lowband.validation import PublishedRow, Setting

MODEL, RANKS, BASE_RANKS = "gpt-20b", 384, 8
MICRO_BATCH, ACCUMULATION, SEQ_LEN = 1, 4, 2048  # with full recomputation and a fused attention
NOTE = "micro-batch 1, accumulation 4, sequence 2048, full recomputation: ours; not stated by the paper"


def tflops(setting: Setting, scheme: str, ranks: int = RANKS) -> float:
    """Model TFLOPS per GCD at our point (`at_point`)."""
    return float(predict(at_point(setting, scheme, ranks), interval=False).tflops_per_gpu)


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

    def ratio(a: str, b: str) -> float:
        return tflops(setting, a) / tflops(setting, b)

    return [
        PublishedRow("frontier: ZeRO++ / ZeRO-3", "ratio", zeropp, lambda: ratio("zeropp", "zero3"), NOTE),
        PublishedRow("frontier: hier3 / ZeRO++", "ratio", hier3, lambda: ratio("hier3", "zeropp"), NOTE),
        PublishedRow("frontier: hier3 / ZeRO-3", "ratio", both, lambda: ratio("hier3", "zero3"), NOTE),
        PublishedRow(
            "frontier: hier3 efficiency",
            "efficiency",
            published("scaling efficiency", ""),
            lambda: tflops(setting, "hier3") / tflops(setting, "hier3", BASE_RANKS),
            f"{NOTE}; base {BASE_RANKS} GCDs, with the same batch per GCD: ours",
        ),
    ]
