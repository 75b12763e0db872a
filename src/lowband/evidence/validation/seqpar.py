"""arXiv 2205.05198, Table 5: seconds per iteration with full and with selective recomputation.

Calculon validates itself on the same rows. Degrees and batches are from Calculon's validation/seqsel/tab5.
"""

from dataclasses import dataclass

from lowband.cost.numbers import Num
from lowband.evidence.validation import PublishedRow, Setting, ranks_name
from lowband.predict.prediction import speed
from lowband.predict.workload import Workload
from lowband.spec.axes import Ways
from lowband.spec.model import ModelSpec


@dataclass(frozen=True)
class SeqparRun:
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


def rows(setting: Setting) -> list[PublishedRow]:
    out = []
    for row in setting.reported.itertuples():
        run, is_full = RUNS[str(row.model)], str(row.scheme).startswith("full")
        model = ModelSpec(
            name=str(row.model), layers=run.layers, hidden=run.hidden, heads=run.heads, vocab=51200,
            seq_len=2048, source="arXiv 2205.05198, Table 3",
        )  # fmt: skip
        axes = Ways(tensor=TENSOR, pipeline=run.pipeline, chunks=run.chunks, sequence_parallel=not is_full)
        job = Workload(
            setting.machine, setting.stack, model, setting.scheme("ddp"), TENSOR * run.pipeline,
            run.micro_batch, 2048, accumulation=run.batch // run.micro_batch,
            recompute="full" if is_full else "selective", attention="plain", dropout=True, axes=axes,
        )  # fmt: skip

        def predicted(job: Workload = job) -> Num:
            return speed(job).step_time_s

        id_ = f"seqpar: {row.model} {'full' if is_full else 'selective'}"
        note = f"Calculon's error on this row: {row.error_pct} %"
        measured_s = float(row.measured_s_per_iter)
        out.append(
            PublishedRow(id_, "s/iteration", measured_s, predicted, model.name, ranks_name(job.ranks), note)
        )
    return out
