"""torchtitan's benchmark tables: peak memory of Llama 3.1 under FSDP2, with tensor, pipeline and context
parallelism. Context parallelism is predicted as shorter sequences: activations are linear in their length.
With a pipeline torchtitan keeps weights gathered and gradients unreduced between micro-batches, as in zero1.
The number of micro-batches is taken to equal that of the stages, its default."""

from typing import Any

from lowband.cost.numbers import GIB
from lowband.evidence.validation import Rows, Setting
from lowband.predict.prediction import predict
from lowband.predict.workload import Workload
from lowband.spec.axes import Ways
from lowband.spec.model import ModelSpec

SHAPES = {  # layers, hidden, heads, MLP width: Llama 3 (arXiv 2407.21783), Table 3
    "llama3.1-8b": (32, 4096, 32, 14336),
    "llama3.1-70b": (80, 8192, 64, 28672),
    "llama3.1-405b": (128, 16384, 128, 53248),  # 126 layers, and torchtitan counts one more for each end
}

IN_16_BITS = ("", "0", "bf16")  # what the column of float8 has then
GPUS = {"dgx-h100": "h100", "dgx-h200": "h200"}


def where(setting: Setting) -> Any:
    df = setting.reported
    df = df[(df["peak_mem_gib"] != "") & df["gpu"].str.startswith(GPUS[setting.machine.name])]
    return df.assign(gpu=df["gpu"].str.split("-").str[0], kind=[kind(row) for row in df.itertuples()])


def kind(row: Any) -> str:
    marks = {
        "compiled": row.compile == "1",
        "float8": row.float8 not in IN_16_BITS,
        "async TP": row.async_tp == "1",
        row.schedule: row.schedule != "",
    }
    return ", ".join(mark for mark, holds in marks.items() if holds) or "eager"


def job(setting: Setting, row: Any, context: int = 1) -> Workload:
    """context: ranks along it; of one the sequences are shorter"""
    layers, hidden, heads, width = SHAPES[str(row.model)]
    seq_len, stages = int(row.seq_len), int(row.pp)
    model = ModelSpec(
        name=str(row.model), layers=layers, hidden=hidden, heads=heads, kv_heads=8, mlp_hidden=width,
        gated=True, biases=False, vocab=128256, seq_len=seq_len, positions="rotary", tied_head=False,
        source="arXiv 2407.21783",
    )  # fmt: skip
    return setting.job(
        model, "zero1" if stages > 1 else "zero3", int(row.n_gpus), int(row.local_batch) // stages,
        seq_len * context // int(row.cp), accumulation=stages,
        recompute="full" if row.act_ckpt == "full" else "op",
        axes=Ways.of_options(int(row.tp), stages, 2 if "Interleaved" in str(row.schedule) else 1, cp=context),
    )  # fmt: skip


ROWS = Rows(
    where=where, job=job, of=lambda job: predict(job, interval=False).peak_memory_bytes / GIB,
    published="peak_mem_gib", id="torchtitan: {gpu} {model} seq {seq_len} on {n_gpus} ({kind})",
    quantity="peak GiB", size="{model}", scale="{n_gpus} GPUs",
)  # fmt: skip
