"""arXiv 2104.04473, Table 1: TFLOP/s per A100 of GPTs of 1.7B to 1T, recomputation counted."""

from lowband.cost.numbers import Num
from lowband.evidence.validation import PublishedRow, Setting, ranks_name
from lowband.predict.prediction import speed
from lowband.predict.workload import Workload
from lowband.spec.axes import Ways
from lowband.spec.model import ModelSpec

VOCAB, SEQ_LEN = 51200, 2048
# Layers per virtual stage, from Megatron's examples/sc21/run_table_1.sh; otherwise one stage per rank.
VIRTUAL_STAGE = {"76.1": 5, "145.6": 5, "310.1": 3, "529.6": 1}
NOTE = "micro-batch and interleaving from Megatron's run_table_1.sh; fp16, plain attention with dropout"


def rows(setting: Setting) -> list[PublishedRow]:
    df = setting.reported
    out = []
    for row in df[(df["artifact"] == "Table 1") & (df["metric"] == "throughput")].itertuples():
        size, layers = str(row.params_B), int(row.layers)
        stages, ranks, micro_batch = int(row.pp), int(row.gpus), int(row.microbatch)
        chunks = layers // stages // VIRTUAL_STAGE.get(size, layers // stages)
        axes = Ways(tensor=int(row.tp), pipeline=stages, chunks=chunks)
        model = ModelSpec(
            name=f"{size}B", layers=layers, hidden=int(row.hidden), heads=int(row.heads), vocab=VOCAB,
            seq_len=SEQ_LEN, source="arXiv 2104.04473, Table 1",
        )  # fmt: skip
        job = Workload(
            setting.machine, setting.stack, model, setting.scheme("ddp"), ranks, micro_batch, SEQ_LEN,
            accumulation=int(row.batch) // axes.degrees(ranks)["data"] // micro_batch,
            attention="plain", dropout=True, axes=axes,
        )  # fmt: skip

        def predicted(job: Workload = job) -> Num:
            return speed(job).hfu_tflops_per_gpu

        out.append(
            PublishedRow(
                f"megatron: {model.name}",
                "TFLOP/s/GPU (recomputation counted)",
                float(row.value),
                predicted,
                model.name,
                ranks_name(ranks),
                NOTE,
            )
        )
    return out
