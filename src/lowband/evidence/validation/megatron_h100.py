"""Megatron-LM's weak scaling of 2024: TFLOP/s per H100 of GPTs of 1.7B to 462B on 48 to 6,144 GPUs."""

from lowband.cost.numbers import Num
from lowband.evidence.validation import PublishedRow, Setting, ranks_name
from lowband.predict.prediction import speed
from lowband.predict.workload import Workload
from lowband.spec.axes import Ways
from lowband.spec.model import ModelSpec

NOTE = "read from a picture; micro-batch 1, one layer a virtual stage, no recomputation: ours, not stated"


def rows(setting: Setting) -> list[PublishedRow]:
    out = []
    for row in setting.reported.itertuples():
        layers, stages, ranks = int(row.layers), int(row.pp), int(row.n_gpus)
        axes = Ways.of_options(int(row.tp), stages, layers // stages if stages > 1 else 1)
        model = ModelSpec(
            name=f"{row.model_b_params}B", layers=layers, hidden=int(row.hidden), heads=int(row.heads),
            vocab=int(row.vocab), seq_len=int(row.seq_len), source="Megatron-LM's README",
        )  # fmt: skip
        job = Workload(
            setting.machine, setting.stack, model, setting.scheme("zero1"), ranks, 1, model.seq_len,
            accumulation=int(row.global_batch_seqs) // int(row.dp), recompute="none", axes=axes,
        )  # fmt: skip

        def predicted(job: Workload = job) -> Num:
            return speed(job).tflops_per_gpu

        id_ = f"megatron-h100: {model.name}"
        rate = float(row.tflops_per_gpu)
        out.append(PublishedRow(id_, "TFLOP/s/GPU", rate, predicted, model.name, ranks_name(ranks), NOTE))
    return out
