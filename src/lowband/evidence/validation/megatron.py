"""arXiv 2104.04473, Table 1: TFLOP/s per A100 of GPTs of 1.7B to 1T, recomputation counted."""

from typing import Any

from lowband.evidence.validation import Rows, Setting, shape
from lowband.predict.prediction import speed
from lowband.predict.workload import Workload
from lowband.spec.axes import Ways

VOCAB, SEQ_LEN = 51200, 2048
# Layers per virtual stage, from Megatron's examples/sc21/run_table_1.sh; otherwise one stage per rank.
VIRTUAL_STAGE = {"76.1": 5, "145.6": 5, "310.1": 3, "529.6": 1}


def job(setting: Setting, row: Any) -> Workload:
    layers, stages, ranks, micro_batch = int(row.layers), int(row.pp), int(row.gpus), int(row.microbatch)
    chunks = layers // stages // VIRTUAL_STAGE.get(str(row.params_B), layers // stages)
    axes = Ways(tensor=int(row.tp), pipeline=stages, chunks=chunks)
    model = shape(
        row, name=f"{row.params_B}B", vocab=VOCAB, seq_len=SEQ_LEN, source="arXiv 2104.04473, Table 1"
    )
    return setting.job(
        model, "ddp", ranks, micro_batch, SEQ_LEN,
        accumulation=int(row.batch) // axes.degrees(ranks)["data"] // micro_batch,
        axes=axes,
    )  # fmt: skip


ROWS = Rows(
    where=lambda setting: setting.reported.query("artifact == 'Table 1' and metric == 'throughput'"),
    job=job, of=lambda job: speed(job).hfu_tflops_per_gpu,
    id="megatron: {params_B}B", quantity="TFLOP/s/GPU (recomputation counted)", size="{params_B}B",
    scale="{gpus} GPUs",
    note="micro-batch and interleaving from Megatron's run_table_1.sh; fp16, plain attention with dropout",
)  # fmt: skip
