"""Llama 2 and 3 under FSDP2, in tokens per second: on 64 GCDs of Frontier (eminorhan/frontier-torchtitan),
and on 64 A100 as torchtitan's tables of 2024 have them, eager. Nothing is fitted on these rows.

"selective layer" recomputes every second layer, "selective op" all but every other matrix product. Without a
compiler a norm was one kernel.
"""

from dataclasses import replace
from typing import Any

from lowband.evidence.validation import Rows, Setting
from lowband.predict.prediction import speed
from lowband.predict.workload import Workload
from lowband.spec.model import ModelSpec

SHAPES = {  # layers, hidden, heads, heads of keys, MLP width, vocabulary (arXiv 2407.21783 and 2307.09288)
    "llama3-8b": (32, 4096, 32, 8, 14336, 128256), "llama3-70b": (80, 8192, 64, 8, 28672, 128256),
    "llama2-13b": (40, 5120, 40, 40, 13824, 32000), "llama2-70b": (80, 8192, 64, 8, 28672, 32000),
}  # fmt: skip
MACHINES = {"frontier": ("Frontier", "GCDs"), "dgx-a100": ("64x A100-80GB", "A100")}
RECOMPUTED = {"none": "none", "full": "full", "selective op": "op", "selective layer": "full"}
EVERY = 2  # of "selective layer"


def where(setting: Setting) -> Any:
    df, (name, devices) = setting.reported, MACHINES[setting.machine.name]
    return df[(df["machine"] == name) & (df["tp"] == "1")].assign(devices=devices)


def job(setting: Setting, row: Any) -> Workload:
    layers, hidden, heads, kv_heads, width, vocab = SHAPES[str(row.model)]
    model = ModelSpec(
        name=str(row.model), layers=layers, hidden=hidden, heads=heads, kv_heads=kv_heads, mlp_hidden=width,
        gated=True, biases=False, vocab=vocab, seq_len=int(row.seq_len), positions="rotary", tied_head=False,
        source="arXiv 2407.21783 or 2307.09288",
    )  # fmt: skip
    found = setting.job(
        model, "zero3", int(row.n_gpus), int(row.local_batch), model.seq_len,
        recompute=RECOMPUTED[row.act_ckpt],
        recompute_layers=layers // EVERY if row.act_ckpt == "selective layer" else None,
    )  # fmt: skip
    operations = "fused" if row.compile == "1" else "norms"
    return replace(found, stack=found.stack.with_options({"operations": operations}))


ROWS = Rows(
    where=where, job=job, of=lambda job: speed(job).tokens_per_s_per_gpu, published="tokens_per_s_per_gpu",
    id="fsdp2: {model} on {n_gpus} {devices}, recompute {act_ckpt}", quantity="tokens/s/GPU", size="{model}",
    scale="{n_gpus} GPUs", note="Frontier's number is 'about'",
)  # fmt: skip
