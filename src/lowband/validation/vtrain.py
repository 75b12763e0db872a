"""vTrain's measured iterations: 1,440 settings of Megatron-LM on 2, 4 and 8 A100 of one node."""

from lowband.predict.prediction import predict
from lowband.predict.workload import Workload
from lowband.spec.model import ModelSpec
from lowband.validation import PublishedRow, Setting

VOCAB = 51200
NOTE = "vocabulary, no recomputation, plain attention: ours"


def rows(setting: Setting) -> list[PublishedRow]:
    out = []
    for row in setting.reported.itertuples():
        model = ModelSpec(
            name=f"{row.params_b}B", layers=int(row.layers), hidden=int(row.hidden), heads=int(row.heads),
            vocab=VOCAB, seq_len=int(row.seq_len), source="vTrain's repository",
        )  # fmt: skip
        micro_batch = int(row.micro_batch)
        job = Workload(
            setting.machine, setting.stack, model, setting.scheme("ddp"), int(row.n_gpus), micro_batch,
            model.seq_len, accumulation=int(row.global_batch) // int(row.dp) // micro_batch, recompute="none",
            attention="plain", dropout=True, tp=int(row.tp), pp=int(row.pp),
        )  # fmt: skip

        def predicted(job: Workload = job) -> float:
            return 1e3 * float(predict(job, interval=False).step_time_s)

        degrees = f"tp{row.tp} dp{row.dp} pp{row.pp}"
        id_ = f"vtrain: {model.name} {degrees} batch {row.global_batch} micro-batch {row.micro_batch}"
        out.append(PublishedRow(id_, "ms/iteration", float(row.iter_ms), predicted, NOTE))
    return out
