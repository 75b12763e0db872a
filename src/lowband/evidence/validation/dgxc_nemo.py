"""NVIDIA's DGX Cloud benchmarks of NeMo: seconds a step of GPT-3, Llama 3 and Nemotron-4 on 8 to 2,048 H100.

Degrees and batches are in the tables. That nothing is recomputed, and that gradients are summed and reduced
in bf16, is what NeMo's recipes for these models have. Pipelines of 405B have stages of unequal depth, which
are played with one value of each constant: cross-validation needs many at once, so these rows are left to
`lowband predict`.
"""

from typing import Any

from lowband.evidence.validation import Rows, Setting, shape
from lowband.predict.prediction import predict
from lowband.predict.workload import Workload
from lowband.spec.axes import Ways

BLOCKS: dict[str, dict[str, Any]] = {
    "gpt": {},
    "llama": {"gated": True, "biases": False, "positions": "rotary", "tied_head": False},
    "nemotron": {"biases": False, "positions": "rotary", "tied_head": False},
}


def where(setting: Setting) -> Any:
    df = setting.reported
    stages = df["pp"].astype(int) * df["vp"].astype(int)
    return df[df["layers"].astype(int) % stages == 0]


def job(setting: Setting, row: Any) -> Workload:
    seq_len, micro_batch = int(row.seq_len), int(row.micro_batch)
    model = shape(
        row, name=row.model, kv_heads=int(row.kv_heads), mlp_hidden=int(row.mlp_hidden), vocab=int(row.vocab),
        seq_len=seq_len, source=row.source, **BLOCKS[row.block],
    )  # fmt: skip
    return setting.job(
        model, "zero1", int(row.n_gpus), micro_batch, seq_len, recompute="none",
        axes=Ways.of_options(int(row.tp), int(row.pp), int(row.vp), cp=int(row.cp)),
        accumulation=int(row.global_batch) // int(row.dp) // micro_batch,
        software={"products": row.precision},
    )  # fmt: skip


ROWS = Rows(
    where=where, job=job, of=lambda job: predict(job, interval=False).step_time_s, published="step_s",
    id="dgxc: {model} {task} {precision} on {n_gpus}", quantity="s/iteration", size="{model}",
    scale="{n_gpus} GPUs",
    note="recomputation and dtype of gradients: those of NeMo's recipes, not in the table",
)  # fmt: skip
