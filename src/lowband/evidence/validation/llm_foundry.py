"""llm-foundry's benchmark tables: tokens per second of MPT under PyTorch FSDP, bf16, 8 to 512 GPUs."""

from lowband.cost.numbers import Num
from lowband.evidence.validation import PublishedRow, Setting, ranks_name
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


def rows(setting: Setting) -> list[PublishedRow]:
    """The published rows, predicted; 8-bit rows are left out, as their products run at another peak rate."""
    df = setting.reported
    df = df[(df["gpu"] == GPUS[setting.machine.name]) & (df["precision"] != "amp_fp8")]
    out = []
    for row in df.itertuples():
        layers, hidden, heads = SHAPES[str(row.model)]
        seq_len, ranks = int(row.seq_len), int(row.n_gpus)
        model = ModelSpec(
            name=f"mpt-{row.model}", layers=layers, hidden=hidden, heads=heads, vocab=VOCAB, seq_len=seq_len,
            source="llm-foundry",
        )  # fmt: skip
        job = Workload(
            setting.machine, setting.stack, model,
            setting.scheme("zero3" if row.sharding == "FULL_SHARD" else "zero2"),
            ranks, int(row.micro_batch), seq_len, accumulation=int(row.grad_accum),
            recompute="full" if row.act_ckpt == "True" else "none",
        )  # fmt: skip

        def predicted(job: Workload = job) -> Num:
            return speed(job).tokens_per_s_per_gpu

        gpu = GPUS[setting.machine.name]
        batch = f"batch {row.micro_batch} x {row.grad_accum}"
        id_ = f"llm-foundry {gpu}: {row.model} seq {seq_len} on {ranks}, {batch}"
        rate = float(row.tokens_per_s) / ranks
        out.append(PublishedRow(id_, "tokens/s/GPU", rate, predicted, str(row.model), ranks_name(ranks)))
    return out
