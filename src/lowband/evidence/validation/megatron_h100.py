"""Megatron-LM's weak scaling of 2024: TFLOP/s per H100 of GPTs of 1.7B to 462B on 48 to 6,144 GPUs.

Micro-batches are not stated. Of one sequence each, three of a rank's four would hide nothing of gradients and
weights on their way between nodes, which take half as long as the 32B model's published step: so without a
pipeline a rank's four sequences are taken to be one micro-batch, which fits its memory.
"""

from typing import Any

from lowband.evidence.validation import Rows, Setting, shape
from lowband.predict.prediction import speed
from lowband.predict.workload import Workload
from lowband.spec.axes import Ways


def job(setting: Setting, row: Any) -> Workload:
    stages, seq_len = int(row.pp), int(row.seq_len)
    axes = Ways.of_options(int(row.tp), stages, int(row.layers) // stages if stages > 1 else 1)
    model = shape(
        row, name=f"{row.model_b_params}B", vocab=int(row.vocab), seq_len=seq_len,
        source="Megatron-LM's README",
    )  # fmt: skip
    batch = int(row.global_batch_seqs) // int(row.dp)
    micro_batch = 1 if stages > 1 else batch
    return setting.job(
        model, "zero1", int(row.n_gpus), micro_batch, seq_len, recompute="none", axes=axes,
        accumulation=batch // micro_batch,
    )  # fmt: skip


ROWS = Rows(
    job=job, of=lambda job: speed(job).tflops_per_gpu, published="tflops_per_gpu",
    id="megatron-h100: {model_b_params}B", quantity="TFLOP/s/GPU", size="{model_b_params}B",
    scale="{n_gpus} GPUs",
    note="read from a picture; micro-batch (in a pipeline 1, else all of a rank's batch), one layer a "
    "virtual stage, no recomputation: ours, not stated",
)  # fmt: skip
