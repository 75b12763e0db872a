"""arXiv 2312.12705: share of peak of the 22B, 175B and 1T models on Frontier, 3D parallel.

Degrees and batches are from the first author's scripts, which need not be those behind the paper's numbers.
The share is taken to count recomputation, as Megatron-DeepSpeed does.
"""

from lowband.cost.numbers import Num
from lowband.evidence.validation import PublishedRow, Setting, ranks_name
from lowband.predict.prediction import speed
from lowband.predict.workload import Workload
from lowband.spec.axes import Ways

MODELS = {"22B": "gpt-22b", "175B": "gpt-175b", "1T": "gpt-1t"}
SCHEMES = {"0": "ddp", "1": "zero1"}
NOTE = "configuration of the first author's script; peak 191.5 TFLOPS per GCD"


def rows(setting: Setting) -> list[PublishedRow]:
    df = setting.reported
    shares = df[df["metric"] == "throughput as share of peak"].set_index("model")["value"]
    scripts = df[(df["artifact"] == "authors launch script") & df["zero_stage"].isin(list(SCHEMES))]
    peak = setting.machine.device.peak_tflops["bf16"]
    out = []
    for row in scripts.drop_duplicates("model").itertuples():
        axes, groups, micro_batch = (
            Ways(tensor=int(row.tp), pipeline=int(row.pp)),
            int(row.dp),
            int(row.mbs),
        )
        job = Workload(
            setting.machine, setting.stack, setting.model(MODELS[row.model]),
            setting.scheme(SCHEMES[row.zero_stage]), axes.tensor * axes.pipeline * groups, micro_batch,
            int(row.seq), accumulation=int(row.gbs) // groups // micro_batch, axes=axes,
        )  # fmt: skip

        def predicted(job: Workload = job) -> Num:
            return 100 * speed(job).hfu_tflops_per_gpu / peak

        out.append(
            PublishedRow(
                f"dash: {row.model}", "% of peak", float(shares[row.model]), predicted, str(row.model),
                ranks_name(job.ranks), NOTE,
            )
        )  # fmt: skip
    return out
