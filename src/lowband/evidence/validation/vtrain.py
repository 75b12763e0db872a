"""vTrain's measured iterations: 1,440 settings of Megatron-LM on 2, 4 and 8 A100 of one node."""

from typing import Any

from lowband.evidence.validation import Rows, Setting, shape
from lowband.predict.prediction import speed
from lowband.predict.workload import Workload
from lowband.spec.axes import Ways

VOCAB = 51200


def job(setting: Setting, row: Any) -> Workload:
    model = shape(
        row, name=f"{row.params_b}B", vocab=VOCAB, seq_len=int(row.seq_len), source="vTrain's repository"
    )
    micro_batch = int(row.micro_batch)
    return setting.job(
        model, "ddp", int(row.n_gpus), micro_batch, model.seq_len,
        accumulation=int(row.global_batch) // int(row.dp) // micro_batch, recompute="none",
        axes=Ways(tensor=int(row.tp), pipeline=int(row.pp)),
    )  # fmt: skip


ROWS = Rows(
    job=job, of=lambda job: 1e3 * speed(job).step_time_s, published="iter_ms",
    id="vtrain: {params_b}B tp{tp} dp{dp} pp{pp} batch {global_batch} micro-batch {micro_batch}",
    quantity="ms/iteration", size="{params_b}B", scale="{n_gpus} GPUs",
    note="vocabulary, no recomputation, plain attention: ours",
)  # fmt: skip
