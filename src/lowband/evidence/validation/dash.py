"""arXiv 2312.12705: share of peak of the 22B, 175B and 1T models on Frontier, 3D parallel.

Degrees and batches are from the first author's scripts, which need not be those behind the paper's numbers.
The share is taken to count recomputation, as Megatron-DeepSpeed does.
"""

from typing import Any

from lowband.cost.numbers import Num
from lowband.evidence.validation import Rows, Setting
from lowband.predict.prediction import speed
from lowband.predict.workload import Workload
from lowband.spec.axes import Ways

MODELS = {"22B": "gpt-22b", "175B": "gpt-175b", "1T": "gpt-1t"}
SCHEMES = {"0": "ddp", "1": "zero1"}


def where(setting: Setting) -> Any:
    df = setting.reported
    shares = df[df["metric"] == "throughput as share of peak"].set_index("model")["value"]
    scripts = df[(df["artifact"] == "authors launch script") & df["zero_stage"].isin(list(SCHEMES))]
    scripts = scripts.drop_duplicates("model")
    ranks = scripts[["tp", "pp", "dp"]].astype(int).prod(axis=1)
    return scripts.assign(value=scripts["model"].map(shares), ranks=ranks)


def job(setting: Setting, row: Any) -> Workload:
    micro_batch = int(row.mbs)
    return setting.job(
        setting.model(MODELS[row.model]), SCHEMES[row.zero_stage], int(row.ranks), micro_batch, int(row.seq),
        accumulation=int(row.gbs) // int(row.dp) // micro_batch,
        axes=Ways(tensor=int(row.tp), pipeline=int(row.pp)),
    )  # fmt: skip


def share_of_peak(job: Workload) -> Num:
    return 100 * speed(job).hfu_tflops_per_gpu / job.machine.device.peak_tflops["bf16"]


ROWS = Rows(
    where=where, job=job, of=share_of_peak,
    id="dash: {model}", quantity="% of peak", size="{model}", scale="{ranks} GPUs",
    note="configuration of the first author's script; peak 191.5 TFLOPS per GCD",
)  # fmt: skip
