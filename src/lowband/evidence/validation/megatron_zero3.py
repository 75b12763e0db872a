"""arXiv 2104.04473, Table 2: TFLOP/s per A100 of ZeRO-3 by DeepSpeed on 384 to 2,240 GPUs.

Nothing is fitted on these rows: the machine's constants are from Table 1, the stack's from other machines.
"""

from typing import Any

from lowband.evidence.validation import Rows, Setting, shape
from lowband.evidence.validation.megatron import SEQ_LEN, VOCAB
from lowband.predict.prediction import speed
from lowband.predict.workload import Workload


def job(setting: Setting, row: Any) -> Workload:
    ranks, micro_batch = int(row.gpus), int(row.microbatch)
    model = shape(
        row, name=f"{row.params_B}B", vocab=VOCAB, seq_len=SEQ_LEN, source="arXiv 2104.04473, Table 2"
    )
    return setting.job(
        model, "zero3", ranks, micro_batch, SEQ_LEN,
        accumulation=int(row.batch) // ranks // micro_batch,
    )  # fmt: skip


ROWS = Rows(
    where=lambda setting: setting.reported.query("artifact == 'Table 2' and scheme == 'ZeRO-3'"),
    job=job, of=lambda job: speed(job).hfu_tflops_per_gpu,
    id="megatron-zero3: {params_B}B on {gpus}", quantity="TFLOP/s/GPU (recomputation counted)",
    size="{params_B}B", scale="{gpus} GPUs",
    note="ZeRO-3's settings are not stated; fp16, plain attention with dropout, recomputation as in Table 1",
)  # fmt: skip
