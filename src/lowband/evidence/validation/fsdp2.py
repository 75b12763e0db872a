"""Llama-3 8B under FSDP2 on 64 GCDs of Frontier (eminorhan/frontier-torchtitan), in tokens per second."""

from lowband.evidence.validation import PublishedRow, Setting, ranks_name
from lowband.predict.prediction import speed
from lowband.predict.workload import Workload
from lowband.spec.model import ModelSpec


def rows(setting: Setting) -> list[PublishedRow]:
    df = setting.reported
    [row] = df[(df["machine"] == "Frontier") & (df["tp"] == "1")].itertuples()
    model = ModelSpec(
        name="llama3-8b", layers=32, hidden=4096, heads=32, kv_heads=8, mlp_hidden=14336, gated=True,
        biases=False, vocab=128256, seq_len=8192, positions="rotary", tied_head=False,
        source="arXiv 2407.21783",
    )  # fmt: skip
    ranks, batch, seq_len = int(row.n_gpus), int(row.local_batch), int(row.seq_len)
    job = Workload(
        setting.machine, setting.stack, model, setting.scheme("zero3"), ranks, batch, seq_len, recompute="op"
    )
    return [
        PublishedRow(
            "frontier-fsdp2: llama3-8b on 64 GCDs",
            "tokens/s/GCD",
            float(row.tokens_per_s_per_gpu),
            lambda: speed(job).tokens_per_s_per_gpu,
            model.name,
            ranks_name(ranks),
            "the published number is 'about'",
        )
    ]
