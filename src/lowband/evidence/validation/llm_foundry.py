"""llm-foundry's benchmark tables: tokens per second of MPT under PyTorch FSDP, bf16, 8 to 512 GPUs."""

from typing import Any

from lowband.evidence.validation import Rows, Setting
from lowband.predict.prediction import speed
from lowband.predict.workload import Workload
from lowband.spec.model import ModelSpec

VOCAB = 50368
SHAPES = {  # layers, hidden, heads: llm-foundry's train/yamls/pretrain; the counts agree with its tables
    "125m": (12, 768, 12), "350m": (24, 1024, 16), "760m": (24, 1536, 12), "1b": (24, 2048, 16),
    "3b": (32, 2560, 20), "7b": (32, 4096, 32), "13b": (40, 5120, 40), "30b": (48, 7168, 56),
    "70b": (80, 8192, 64),
}  # fmt: skip
GPUS = {"dgx-h100": "h100_80gb", "dgx-a100": "a100_80gb", "dgx-a100-40gb": "a100_40gb"}


def where(setting: Setting) -> Any:
    """The machine's rows, but those in 8 bits, whose products run at another peak rate."""
    df = setting.reported
    df = df[(df["gpu"] == GPUS[setting.machine.name]) & (df["precision"] != "amp_fp8")]
    return df.assign(rate=df["tokens_per_s"].astype(float) / df["n_gpus"].astype(int))


def job(setting: Setting, row: Any) -> Workload:
    layers, hidden, heads = SHAPES[str(row.model)]
    seq_len = int(row.seq_len)
    model = ModelSpec(
        name=f"mpt-{row.model}", layers=layers, hidden=hidden, heads=heads, vocab=VOCAB, seq_len=seq_len,
        source="llm-foundry",
    )  # fmt: skip
    return setting.job(
        model, "zero3" if row.sharding == "FULL_SHARD" else "zero2",
        int(row.n_gpus), int(row.micro_batch), seq_len, accumulation=int(row.grad_accum),
        recompute="full" if row.act_ckpt == "True" else "none",
    )  # fmt: skip


ROWS = Rows(
    where=where, job=job, of=lambda job: speed(job).tokens_per_s_per_gpu, published="rate",
    id="llm-foundry {gpu}: {model} seq {seq_len} on {n_gpus}, batch {micro_batch} x {grad_accum}",
    quantity="tokens/s/GPU", size="{model}", scale="{n_gpus} GPUs",
)  # fmt: skip
