"""arXiv 2104.04473, Table 2: TFLOP/s per A100 of ZeRO-3 by DeepSpeed on 384 to 2,240 GPUs.

Nothing is fitted on these rows: the machine's constants are from Table 1, the stack's from other machines.
"""

from lowband.cost.numbers import Num
from lowband.evidence.validation import PublishedRow, Setting, ranks_name
from lowband.evidence.validation.megatron import SEQ_LEN, VOCAB
from lowband.predict.prediction import speed
from lowband.predict.workload import Workload
from lowband.spec.model import ModelSpec

NOTE = "ZeRO-3's settings are not stated; fp16, plain attention with dropout, recomputation as in Table 1"


def rows(setting: Setting) -> list[PublishedRow]:
    df = setting.reported
    out = []
    for row in df[(df["artifact"] == "Table 2") & (df["scheme"] == "ZeRO-3")].itertuples():
        ranks, micro_batch = int(row.gpus), int(row.microbatch)
        model = ModelSpec(
            name=f"{row.params_B}B", layers=int(row.layers), hidden=int(row.hidden), heads=int(row.heads),
            vocab=VOCAB, seq_len=SEQ_LEN, source="arXiv 2104.04473, Table 2",
        )  # fmt: skip
        job = Workload(
            setting.machine, setting.stack, model, setting.scheme("zero3"), ranks, micro_batch, SEQ_LEN,
            accumulation=int(row.batch) // ranks // micro_batch, attention="plain", dropout=True,
        )  # fmt: skip

        def predicted(job: Workload = job) -> Num:
            return speed(job).hfu_tflops_per_gpu

        out.append(
            PublishedRow(
                f"megatron-zero3: {model.name} on {ranks}",
                "TFLOP/s/GPU (recomputation counted)",
                float(row.value),
                predicted,
                model.name,
                ranks_name(ranks),
                NOTE,
            )
        )
    return out
