"""Llama-3 8B under FSDP2 on 64 GCDs of Frontier (eminorhan/frontier-torchtitan), in tokens per second."""

from typing import Any

from lowband.evidence.validation import Rows, Setting
from lowband.predict.prediction import speed
from lowband.predict.workload import Workload
from lowband.spec.model import ModelSpec

MODEL = ModelSpec(
    name="llama3-8b", layers=32, hidden=4096, heads=32, kv_heads=8, mlp_hidden=14336, gated=True,
    biases=False, vocab=128256, seq_len=8192, positions="rotary", tied_head=False,
    source="arXiv 2407.21783",
)  # fmt: skip


def job(setting: Setting, row: Any) -> Workload:
    return setting.job(
        MODEL, "zero3", int(row.n_gpus), int(row.local_batch), int(row.seq_len), recompute="op"
    )


ROWS = Rows(
    where=lambda setting: setting.reported.query("machine == 'Frontier' and tp == '1'"),
    job=job, of=lambda job: speed(job).tokens_per_s_per_gpu, published="tokens_per_s_per_gpu",
    id="frontier-fsdp2: {model} on {n_gpus} GCDs", quantity="tokens/s/GCD", size="{model}",
    scale="{n_gpus} GPUs", note="the published number is 'about'",
)  # fmt: skip
