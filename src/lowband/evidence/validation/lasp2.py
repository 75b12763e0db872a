"""LASP-2's published throughputs and memory (arXiv 2502.07563), by closed forms of linear layers.

Table 6: one sequence over all GPUs, states gathered. The paper's cluster is 8 A100 of 80 GB a node; here it
is slurm/dgx-a100 with Megatron-LM's stack, states whole on each GPU and gradients reduced in fp32, as the
printed memory does not fall as GPUs are added. The model's shape is Llama 3.2 1B's with linear attention and
as many heads of keys as of queries, and nothing is recomputed: the paper prints 16 layers.

    as it is     nothing fitted
    one number   seconds that every step takes beside: from the shortest sequence on the fewest GPUs. The
                 printed step takes 1.6 s from 2K to 128K tokens, on 16 GPUs and on 128

Gains over ring attention and over LASP, on 64 GPUs with 2,048K tokens, are ratios of predicted throughputs,
as it is: ring attention computes all pairs of softmax, LASP passes its states from rank to rank.
"""

from typing import Any

import pandas as pd

from lowband.evidence.validation import published_row, reported
from lowband.predict.prediction import predict
from lowband.predict.request import job_of
from lowband.predict.workload import Workload
from lowband.spec.axes import Ways
from lowband.spec.config import Config

REPORTED = "12_lasp2.csv"
K = 1024
SHAPE = "llama-3.2-1b"
LONGEST, GPUS = 2048 * K, 64  # of the gains
AXES = {"LASP-2": ("state", "gather"), "LASP": ("state", "pass"), "Ring Attention": ("ring", "auto")}


def lasp2(config: Config) -> pd.DataFrame:
    """A row per published number and prediction of it; off_percent: of what was published."""
    printed = reported(config, REPORTED)
    cells = printed[(printed["artifact"] == "Table 6") & (printed["value"] != "OOM")]
    speeds, memory = (cells[cells["metric"] == name] for name in ("throughput", "memory per GPU"))
    first = speeds.iloc[0]
    fitted_on = int(first.gpus), int(first.seq_len)
    beside_s = int(first.seq_len) / float(first.value) - _step_s(config, "LASP-2", *fitted_on)
    rows = []
    for row in speeds.itertuples():
        gpus, length = int(row.gpus), int(row.seq_len)
        step_s = _step_s(config, "LASP-2", gpus, length)
        rows.append(_row(row, "throughput", "as it is", length / step_s))
        use = "fitted" if (gpus, length) == fitted_on else "held out"
        rows.append(_row(row, "throughput, one number fitted", use, length / (step_s + beside_s)))
    for row in memory.itertuples():
        found = predict(_job(config, "LASP-2", int(row.gpus), int(row.seq_len)), interval=False)
        rows.append(_row(row, "memory", "as it is", float(found.peak_memory_bytes) / 1e9))
    ours = _step_s(config, "LASP-2", GPUS, LONGEST)
    for row in printed[printed["metric"] == "throughput gain"].itertuples():
        gain = 100 * (_step_s(config, row.baseline, GPUS, LONGEST) / ours - 1)
        rows.append(_row(row, f"gain over {row.baseline}", "as it is", gain))
    return pd.DataFrame(rows)


def _job(config: Config, system: str, gpus: int, seq_len: int) -> Workload:
    way, states = AXES[system]
    attention = "linear" if way == "state" else "softmax"
    model = config.model(SHAPE).model_copy(update={"attention": attention, "kv_heads": None})
    axes = Ways.of_options(cp=gpus).model_copy(
        update={"context_attention": way, "context_states": states, "zigzag": False}
    )
    machine, stack = config.machine("dgx-a100"), config.stack_on("megatron-lm", "dgx-a100")
    return job_of(
        machine, stack, model, config.scheme("ddp"), gpus, 1, seq_len, recompute="none", axes=axes,
        software={"reduce_dtype": "fp32"},
    )  # fmt: skip


def _step_s(config: Config, system: str, gpus: int, seq_len: int) -> float:
    return float(predict(_job(config, system, gpus, seq_len), interval=False).step_time_s)


def _row(row: Any, quantity: str, use: str, predicted: float) -> dict[str, object]:
    setting = f"{row.gpus} GPUs, {int(row.seq_len) // K}K tokens"
    return published_row(row, quantity, use, setting, predicted)
