"""vTrain's measured iterations: 1,440 settings of Megatron-LM on 2, 4 and 8 A100 of one node."""

from typing import Any

from lowband.cost.numbers import Num
from lowband.evidence.validation import PublishedRow, Setting, ranks_name
from lowband.predict.prediction import speed
from lowband.predict.workload import Workload
from lowband.spec.axes import Ways
from lowband.spec.model import ModelSpec

VOCAB = 51200
NOTE = "vocabulary, no recomputation, plain attention: ours"


def rows(setting: Setting) -> list[PublishedRow]:
    out = []
    for row in setting.reported.itertuples():
        size = f"{row.params_b}B"

        def predicted(row: Any = row) -> Num:
            return 1e3 * speed(_job(setting, row)).step_time_s

        degrees = f"tp{row.tp} dp{row.dp} pp{row.pp}"
        id_ = f"vtrain: {size} {degrees} batch {row.global_batch} micro-batch {row.micro_batch}"
        scale = ranks_name(int(row.n_gpus))
        out.append(PublishedRow(id_, "ms/iteration", float(row.iter_ms), predicted, size, scale, NOTE))
    return out


def _job(setting: Setting, row: Any) -> Workload:
    """The run behind a row. Made when it is predicted: a fit predicts few of the 1,440."""
    model = ModelSpec(
        name=f"{row.params_b}B", layers=int(row.layers), hidden=int(row.hidden), heads=int(row.heads),
        vocab=VOCAB, seq_len=int(row.seq_len), source="vTrain's repository",
    )  # fmt: skip
    micro_batch = int(row.micro_batch)
    return Workload(
        setting.machine, setting.stack, model, setting.scheme("ddp"), int(row.n_gpus), micro_batch,
        model.seq_len, accumulation=int(row.global_batch) // int(row.dp) // micro_batch, recompute="none",
        attention="plain", dropout=True, axes=Ways(tensor=int(row.tp), pipeline=int(row.pp)),
    )  # fmt: skip
