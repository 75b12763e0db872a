"""What papers on states beyond the device print, predicted, and what the closed forms of tiers say of it.

Largest models: printed without a batch; predicted with one sequence of 1,024 tokens a device, in ZeRO-3 with
the optimizer's states, and of one GPU also the weights, in the host's memory (search/largest.py). `above`:
the printed number is a lower bound, and only a smaller prediction is off.

Throughput of ZeRO-Offload and ZeRO-Infinity's tier of host memory on DGX-2 (DeepSpeed's figures): printed
without a batch; predicted with the largest that fits, and with the least tensor degree at which any does, so
what was printed need not be near. TFLOP/s count recomputation, as of ZeRO++. The shapes of 10B, 20B and 1T
are those of config/models.yaml, 2T is wider. Checkpoints of activations stay on the device, unlike the
paper's.

Of 200B speedups over 64 GPUs are printed, more than in proportion: of more devices each has a smaller part of
the weights, and of more nodes the host's update.

MLP-Offload: steps of 40 to 120 billion parameters on four GPUs with states on NVMe. Disks decide, so a step
is its bytes over a rate: 12 of each parameter read, 12 written. One rate for DeepSpeed and one for
MLP-Offload are fitted on the rows of 70B, all others are held out.

ZenFlow prints that ZeRO-Offload moves twice the model's bytes over PCIe in a step: gradients and new weights.
"""

from dataclasses import replace
from typing import Any

import pandas as pd

from lowband.cost.memory import STATE_BYTES
from lowband.cost.tiers import Beyond
from lowband.evidence.validation import published_row, reported
from lowband.predict.prediction import predict
from lowband.predict.request import setting
from lowband.predict.search.largest import largest, of_width
from lowband.predict.workload import Workload
from lowband.spec.axes import Ways
from lowband.spec.config import Config
from lowband.spec.machine import Machine
from lowband.spec.model import ModelSpec

REPORTED = "13_tiers.csv"
SEQ_LEN = 1024
OPTIM, ALL = ("optim@host",), ("optim@host", "weights@host")
GB_240, GB_1000 = 223.5, 931.3  # in GiB

# metric as printed -> setting, cluster, GPUs, the host's memory of a node in GiB if not the machine's, places
LARGEST: dict[str, tuple[str, str, int, float | None, tuple[str, ...]]] = {
    "largest model on one DGX-2, above": ("above", "dgx2", 16, None, OPTIM),
    "largest model, 1 GPU, above": ("above", "dgx2", 1, None, ALL),
    "largest model, 8 V100 + 240GB host": ("as it is", "dgx2", 8, GB_240, OPTIM),
    "largest model, 8 A100 + 1TB host": ("as it is", "dgx-a100", 8, GB_1000, OPTIM),
}
THROUGHPUT: dict[str, tuple[str, tuple[str, ...]]] = {  # model as printed -> ours, and places
    "10B": ("gpt-10b", OPTIM), "20B": ("gpt-20b", ALL), "1000B": ("gpt-1t", ALL), "2000B": ("gpt-1t", ALL),
}  # fmt: skip
TWO_T = {"name": "gpt-2t", "layers": 160, "hidden": 32768, "heads": 256}
HEADS_200B, MOST_SEQUENCES = 100, 65
SPEEDUP, FEWEST = "speedup over 64 GPUs", 64
FITTED_ON = "70B"


def published_tiers(config: Config) -> pd.DataFrame:
    """A row per published number and prediction of it; off_percent: of what was published."""
    printed = reported(config, REPORTED)
    rows = [
        published_row(row, "largest model", use, row.metric, _largest(config, cluster, gpus, room, places))
        for metric, (use, cluster, gpus, room, places) in LARGEST.items()
        for row in printed[printed["metric"] == metric].itertuples()
    ]
    figures = printed[(printed["metric"] == "throughput") & printed["unit"].str.startswith("TFLOP/s")]
    for row in figures[figures["artifact"] == "blog"].itertuples():
        if row.model in THROUGHPUT and "Offload" in row.system:
            setting_ = f"{row.model} on {row.gpus} GPUs"
            found = throughput(config, row.model, int(row.gpus))
            rows.append(published_row(row, "throughput", "largest batch", setting_, found))
    for row in printed[printed["metric"] == SPEEDUP].itertuples():
        few, many = (throughput(config, row.model, gpus) for gpus in (FEWEST, int(row.gpus)))
        found, where = many / few * int(row.gpus) / FEWEST, f"{row.model} on {row.gpus} GPUs"
        rows.append(published_row(row, SPEEDUP, "largest batch", where, found))
    rows += _on_disk(printed[printed["paper"].str.contains("MLP-Offload")])
    for row in printed[printed["metric"].str.startswith("PCIe traffic per step")].itertuples():
        times = float(str(row.value).split(",")[1].split()[0])
        rows.append(published_row(row, "traffic, times the model", "as it is", "ZeRO-Offload", 2.0, times))
    return pd.DataFrame(rows)


def _job(
    config: Config, cluster: str, model: ModelSpec, gpus: int, places: tuple[str, ...], tensor: int = 1
) -> Workload:
    machine, stack = setting(config, cluster, "deepspeed-zero")
    scheme = config.scheme("zero3").on(list(machine.sizes))
    axes, beyond = Ways(tensor=tensor), Beyond.of(places)
    return Workload(machine, stack, model, scheme, gpus, 1, SEQ_LEN, axes=axes, beyond=beyond)


def _largest(
    config: Config, cluster: str, gpus: int, room_gib: float | None, places: tuple[str, ...]
) -> float:
    """Billions of parameters."""
    job = _job(config, cluster, config.model("gpt-20b"), gpus, places)
    if room_gib is not None:
        job = replace(job, machine=_with_host(job.machine, room_gib))
    found = largest(job, [places])[0]
    return 0.0 if found.job is None else found.job.model.parameters / 1e9


def _with_host(machine: Machine, capacity_gib: float) -> Machine:
    host = machine.tier("host").model_copy(update={"capacity_gib": capacity_gib})
    return machine.model_copy(update={"tiers": machine.tiers | {"host": host}})


def throughput(config: Config, name: str, gpus: int) -> float:
    """TFLOP/s of a GPU with the largest micro-batch that fits, hardware FLOPs; 0 if nothing fits."""
    model, places = _shape(config, name)
    for tensor in (1, 2, 4, 8):
        if gpus % tensor:
            break
        job, found = _job(config, "dgx2", model, gpus, places, tensor), 0.0
        for sequences in range(1, MOST_SEQUENCES):
            prediction = predict(replace(job, micro_batch=sequences), interval=False)
            if not prediction.fits:
                break
            found = float(prediction.hfu_tflops_per_gpu)
        if found:
            return found
    return 0.0


def _shape(config: Config, name: str) -> tuple[ModelSpec, tuple[str, ...]]:
    """The model of a printed size, and where its states lie."""
    if name == "200B":
        return of_width(config.model("gpt-175b"), HEADS_200B), ALL
    of, places = THROUGHPUT[name]
    model = config.model(of)
    return (model.model_copy(update=TWO_T) if name == "2000B" else model), places


def _on_disk(rows: Any) -> list[dict[str, object]]:
    steps = rows[rows["metric"] == "time, step"]
    found = []
    for system, of in steps.groupby("system", sort=False):
        moved = {row.model: 2 * STATE_BYTES * float(row.params_b) for row in of.itertuples()}  # 10^9 bytes
        at = of[of["model"] == FITTED_ON].iloc[0]
        rate = moved[FITTED_ON] / (float(at["value"]) / 1e3)
        for row in of.itertuples():
            use = "fitted" if row.model == FITTED_ON else "held out"
            where = f"{system}, {row.model}"
            step_ms = 1e3 * moved[row.model] / rate
            found.append(published_row(row, "step on NVMe", use, where, step_ms) | {"source": row.paper})
    return found
