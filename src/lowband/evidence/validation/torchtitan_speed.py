"""torchtitan's benchmark tables: tokens per second of Llama 3.1 on H100 and H200, eager and compiled, in bf16
and with products in fp8, with tensor, pipeline and context parallelism. Nothing is fitted on these rows.

An empty sequence length is the repository's default, 8,192. The H100 have 96 GB of HBM2e and 500 W. float8
with a scale for each row ("rowwise") was slower than bf16 in June 2025; the model knows no such product.
Asynchronous tensor parallelism is predicted as the other kind: hidden like the sharding's collectives, its
rows would be 9 to 31 % too fast.
"""

from dataclasses import replace
from typing import Any

from lowband.evidence.validation import Rows, Setting
from lowband.evidence.validation import torchtitan as memory
from lowband.predict.prediction import speed
from lowband.predict.workload import Workload

SEQ_LEN = "8192"


def where(setting: Setting) -> Any:
    df = setting.reported
    df = df[df["gpu"].str.startswith(memory.GPUS[setting.machine.name])]
    kinds = [
        ", ".join([memory.kind(row), *([row.float8] if "-" in row.float8 else [])]) for row in df.itertuples()
    ]
    full = df.assign(
        seq_len=df["seq_len"].replace("", SEQ_LEN), gpu=df["gpu"].str.split("-").str[0], kind=kinds
    )
    return full.assign(
        model=full["model"].replace({"llama3-8b": "llama3.1-8b", "llama3-70b": "llama3.1-70b"})
    )


def job(setting: Setting, row: Any) -> Workload:
    fp8 = row.float8 not in memory.IN_16_BITS
    found = memory.job(setting, row, context=int(row.cp))
    told = {
        "products": "fp8" if fp8 else "bf16",
        "operations": "fused" if row.compile == "1" else "single",
    }
    return replace(found, stack=found.stack.with_options(told))


ROWS = Rows(
    where=where, job=job, of=lambda job: speed(job).tokens_per_s_per_gpu, published="tokens_per_s_per_gpu",
    id="torchtitan: {gpu} {model} seq {seq_len} on {n_gpus} ({kind}), tokens/s", quantity="tokens/s/GPU",
    size="{model}", scale="{n_gpus} GPUs",
)  # fmt: skip
