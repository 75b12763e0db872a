"""arXiv 2205.05198, Table 5: seconds per iteration with full and with selective recomputation.

Calculon validates itself on the same rows. Degrees and batches are from Calculon's validation/seqsel/tab5.
"""

from typing import Any, NamedTuple

from lowband.evidence.validation import Rows, Setting, shape
from lowband.predict.prediction import speed
from lowband.predict.workload import Workload
from lowband.spec.axes import Ways


class SeqparRun(NamedTuple):
    layers: int
    hidden: int
    heads: int
    pipeline: int
    chunks: int
    batch: int
    micro_batch: int


TENSOR = 8
RUNS = {
    "megatron-22B": SeqparRun(48, 6144, 64, 1, 1, 4, 4),
    "gpt3-175B": SeqparRun(96, 12288, 96, 8, 3, 64, 1),
    "turing-530B": SeqparRun(105, 20480, 128, 35, 3, 280, 1),
    "megatron-1T": SeqparRun(128, 25600, 160, 64, 1, 512, 1),
}


def where(setting: Setting) -> Any:
    df = setting.reported
    ranks = [TENSOR * RUNS[model].pipeline for model in df["model"]]
    return df.assign(recompute=df["scheme"].str.split().str[0], ranks=ranks)


def job(setting: Setting, row: Any) -> Workload:
    run = RUNS[row.model]
    model = shape(run, name=row.model, vocab=51200, seq_len=2048, source="arXiv 2205.05198, Table 3")
    return setting.job(
        model, "ddp", row.ranks, run.micro_batch, 2048, accumulation=run.batch // run.micro_batch,
        recompute=row.recompute,
        axes=Ways(tensor=TENSOR, pipeline=run.pipeline, chunks=run.chunks),
        software={"sequence_parallel": row.recompute == "selective"},
    )  # fmt: skip


ROWS = Rows(
    where=where, job=job, of=lambda job: speed(job).step_time_s, published="measured_s_per_iter",
    id="seqpar: {model} {recompute}", quantity="s/iteration", size="{model}", scale="{ranks} GPUs",
    note="Calculon's error on this row: {error_pct} %",
)  # fmt: skip
