"""Recipes of whole training runs that were published, predicted: Nemotron-4, Mixtral, Qwen2, DeepSeek-V3.

Nothing was fitted on them. Machine and stack are those of Megatron-LM's weak scaling on H100 (eos-2024,
megatron-lm), which is what ran all but DeepSeek-V3. Recomputation is not stated, and taken to be none. Where
the stages on a rank or the micro-batch are not printed, each that is possible is a row, named in `use`.

Two recipes cannot be said in full:

    MCore w/ Folding  experts are whole on ranks along tensor (ETP 1), with their 8 ranks in one node. Ours
                      are cut along tensor, so 8 of them lie over two nodes: `nearest`
    DeepSeek-V3       61 layers, of which three have no experts, and one more that predicts a second token, on
                      16 ranks in both directions at once (DualPipe), so that the longest stages have four
                      layers. Predicted are 64 layers, four a rank, by DualPipe's list of one direction
                      (dualpipe-v), where every rank has as much as those with most. There exchanges with
                      experts hide behind another micro-batch, and ours behind nothing: the step is predicted
                      with them and without. That a token goes to at most 4 of the 8 nodes, out in fp8, is not
                      predicted either. Memory is not compared: its recomputation by operator and moments in
                      bf16 cannot be said.
"""

from collections.abc import Iterator
from typing import Any

import pandas as pd

from lowband.evidence.validation import published_row, reported
from lowband.predict.prediction import Prediction, predict
from lowband.predict.request import job_of, setting
from lowband.predict.workload import Workload
from lowband.spec.axes import Ways
from lowband.spec.config import Config

REPORTED = "17_recipes.csv"
CLUSTER, STACK = "eos-2024", "megatron-lm"
PUBLISHED_BESIDE = {"NVIDIA/dgxc-benchmarking": "dgxc_nemo_h100.csv"}  # other rows of that repository
PEAK_TFLOPS = 989.5  # of which arXiv 2504.14960 prints shares
TOKENS = 10**12
STAGES = {"nemotron-4-340b": (2, 4, 8), "qwen2-57b-a14b": (1, 7)}  # where interleaving is not printed
MICRO_BATCHES = 1, 2, 4
LONGEST = 4  # layers of the longest stages of DeepSeek-V3's ranks
MODEL = "deepseek-v3"


def published_recipes(config: Config) -> pd.DataFrame:
    """A row per published number and prediction of it; off_percent: of what was published."""
    rows = []
    for row in reported(config, REPORTED).itertuples():
        where = f"{row.model}, {int(row.gpus):,} GPUs, batch {int(row.batch):,}, {row.products}"
        of_row = _of_deepseek(config, row) if row.model == MODEL else _of_megatron(config, row)
        rows += [published_row(row, str(row.metric), use, where, found) for use, found in of_row]
    return pd.DataFrame(rows)


def _of_megatron(config: Config, row: Any) -> Iterator[tuple[str, float]]:
    """What is predicted, by what was taken for unknown."""
    for use, job in jobs(config, row):
        found = predict(job, interval=False)
        share = 100 * float(found.tflops_per_gpu) / PEAK_TFLOPS
        yield use, share if row.metric == "MFU" else float(found.step_time_s)


def jobs(config: Config, row: Any) -> Iterator[tuple[str, Workload]]:
    """Those that a row of the CSV may be, by what of them it does not say."""
    nearest = "nearest" if row.system == "MCore w/ Folding" else "as it is"
    for chunks in [int(row.interleave)] if row.interleave else STAGES[row.model]:
        for micro_batch in [int(row.micro_batch)] if row.micro_batch else _micro_batches(row):
            unknown = [] if row.interleave else [f"{chunks} stages a rank"]
            unknown += [] if row.micro_batch else [f"micro-batch {micro_batch}"]
            use = ", ".join(unknown) or nearest
            yield use, _job(config, row, CLUSTER, row.model, chunks, micro_batch)


def _micro_batches(row: Any) -> tuple[int, ...]:
    """In a pipeline the smallest."""
    return (1,) if int(row.pp) > 1 else MICRO_BATCHES


def _job(
    config: Config, row: Any, cluster: str, model: str, chunks: int, micro_batch: int, **other: object
) -> Workload:
    """other: fields of the model, or of the axes, in place of their own"""
    machine, stack = setting(config, cluster, STACK)
    spec = config.model(model)
    fields = {key: value for key, value in other.items() if key in type(spec).model_fields}
    axes = Ways.of_options(int(row.tp), int(row.pp), chunks, ep=int(row.ep))
    ways = axes.model_copy(update={key: value for key, value in other.items() if key not in fields})
    ranks = int(row.gpus)
    share = int(row.batch) // axes.with_context(ranks)["data"]
    return job_of(
        machine, stack, spec.model_copy(update=fields), config.scheme("zero1"), ranks, micro_batch,
        int(row.seq_len), share // micro_batch, "none", ways, {"products": row.products},
    )  # fmt: skip


def _of_deepseek(config: Config, row: Any) -> Iterator[tuple[str, float]]:
    """Of the step and GPU hours the bounds."""
    job = of_deepseek(config, row)
    found = predict(job, interval=False)
    exchanges, step = float(found.time_s["experts"]), float(found.step_time_s)
    if row.metric == "bubble":
        yield "exchanges waited for", float(found.time_s["bubble"])
    elif row.metric == "computation to exchanges":
        yield "as it is", computed_s(found) / exchanges
    else:
        hours = TOKENS / job.tokens * job.ranks / 3600 / 1000 if row.unit == "10^3 h" else 1.0
        yield "exchanges hidden", float(hours) * (step - exchanges)
        yield "exchanges waited for", float(hours) * step


def of_deepseek(config: Config, row: Any) -> Workload:
    """The job that stands for the recipe, as the module says."""
    layers = LONGEST * int(row.pp)
    return _job(config, row, "h800", MODEL, 2, 1, layers=layers, schedule="dualpipe-v")


def computed_s(found: Prediction) -> float:
    """Seconds of a step in which a rank computes."""
    return sum(float(found.time_s[name]) for name in ("forward", "recompute", "backward", "straggler"))
