"""Raw logs of Deep Optimizer States (arXiv 2410.21316), predicted: 102 runs of GPTs called 7B, 8B and 20B.

By their shapes they have 6.7, 8.3 and 12.9 billion parameters. A step is forward and backward on the devices
(predict/time.py), gradients that go down, the host's update, and a fixed rest:

    as DeepSpeed ships it   2 r n / G more of the backward, which waits for each copy into pageable memory
    asynchronous copies     2 r n / S at the link's rate S, which hides nothing there either
    update                  r n (28 / U + 2 / C): new weights are cast and copied one after the other
    Deep Optimizer States   the update of cost/tiers.py at its stride: copies hide behind it

n: parameters of a rank, r: Twin-Flow's share. Hardware is stated of 30 logs. Those of the folders called
`motivation` have the times of Polaris, to which they are counted; the others make up two settings of their
own, of which the third has the speed of H100. Of each setting a few logs are fitted on, in logarithms of the
step, the update and the rest; all others are held out. What a folder's name does not say is not guessed: of
eight logs of sizes of subgroups (`subg-size`) the backward is that of asynchronous copies, their names do not
say so, and their predictions are far off.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any

import numpy as np

from lowband.cost.numbers import GIGA
from lowband.cost.tiers import UPDATE_BYTES, Rates, update_s
from lowband.evidence.validation import reported
from lowband.evidence.validation.validate import with_facts
from lowband.predict.request import setting
from lowband.predict.time import step_time
from lowband.predict.workload import Workload
from lowband.spec.axes import Ways
from lowband.spec.config import Config
from lowband.spec.machine import Machine
from lowband.spec.model import ModelSpec
from lowband.spec.stack import Stack

REPORTED = "13_deep_optimizer_states.csv"
SYSTEMS = {
    "DeepSpeed ZeRO-3 + CPU optimizer": "blocking copies",
    "same + asynchronous gradient copies": "asynchronous copies",
    "Deep Optimizer States": "interleaved",
}
SEQ_LEN, VOCAB, NODE = 2048, 50304, 4
COPIED = 2  # bytes of a gradient, and of a new weight
OVERLAP = 0.34  # of DeepSpeed's collectives, as fitted on DGX-2

# constant -> least and most that it may be, and its path among the facts of machine and stack, if it has one
BOUNDS = {
    "matmul_efficiency": (0.3, 0.9, "device.matmul_efficiency"),  # share of the peak
    "unit_ms": (0.0, 6.0, "stack.unit_us"),  # the host's time for a block's hooks
    "node_efficiency": (0.05, 1.0, "stack.efficiency.any"),  # of links in a node, and between nodes
    "world_efficiency": (0.05, 1.0, "stack.efficiency.world"),
    "update": (20.0, 300.0, ""),  # 10^9 bytes a second of one rank alone, U; and of all of a node
    "node_update": (30.0, 300.0, ""),
    "blocking": (1.0, 30.0, ""),  # likewise of blocking copies, G
    "node_blocking": (2.0, 60.0, ""),
    "cast": (1.0, 63.0, ""),  # of new weights, C
    "link": (10.0, 63.0, ""),  # of asynchronous copies, S
    "rest_s": (0.0, 1.0, ""),
}
FACTS = [name for name, (_, _, path) in BOUNDS.items() if path]
Constants = Mapping[str, float]


@dataclass(frozen=True)
class Logs:
    """A setting: which logs are its own, which of them are fitted on, which constants are free.

    start: of those that are fitted, and the values of others; what it does not name is as on Polaris
    """

    cluster: str
    folders: str  # a pattern
    fitted: str  # a pattern of names of logs
    free: tuple[str, ...]
    start: Mapping[str, float]

    def is_fitted_on(self, log: "Log") -> bool:
        return bool(re.search(self.fitted, log.name))


SETTINGS = {
    "polaris": Logs(
        "polaris", "7B-scale-DP|7B-scale-GA|motivation",
        r"scale-DP/.*-dp[148]-|scale-GA.*gbs64.*async1",
        tuple(name for name in BOUNDS if name != "unit_ms"),
        {"matmul_efficiency": 0.6, "unit_ms": 0.0, "node_efficiency": 0.5, "world_efficiency": 0.4,
         "update": 56.0, "node_update": 87.0, "blocking": 4.0, "node_blocking": 12.0, "cast": 15.0,
         "link": 22.0, "rest_s": 0.35},
    ),
    "another node of A100": Logs(
        "polaris", "gaps-a100", r"7B-scale-gaps.*opt_gaps(0|2|10)\.log",
        ("unit_ms", "node_update", "node_blocking", "cast", "rest_s"),
        {"unit_ms": 2.0, "update": 300.0, "node_update": 87.0, "blocking": 30.0, "node_blocking": 12.0,
         "cast": 7.0, "rest_s": 0.35},
    ),
    "a node not stated": Logs(
        "dgx-h100", "twinflow", r"20B-scale-twinflow/.*ratio(0\.5|1\.0)",
        ("matmul_efficiency", "node_update", "node_blocking", "cast", "link", "rest_s"),
        {"matmul_efficiency": 0.55, "unit_ms": 1.0, "update": 300.0, "node_update": 150.0, "blocking": 30.0,
         "node_blocking": 8.0, "cast": 7.0, "link": 22.0, "rest_s": 0.35},
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Log:
    """One run. ratio: the share r; times in seconds: of the step, its update, and forward and backward"""

    name: str
    system: str
    model: ModelSpec
    tensor: int
    data: int
    micro_batch: int
    accumulation: int
    ratio: float
    stride: int
    step_s: float
    update_s: float
    passes_s: float


@dataclass(frozen=True)
class Parts:
    """Seconds of a predicted step."""

    passes: float
    copies: float
    update: float
    rest: float

    @property
    def step(self) -> float:
        return self.passes + self.copies + self.update + self.rest


@cache
def fitted(config: Config, name: str) -> dict[str, float]:
    """The constants of a setting, by bounded least squares of logarithms."""
    of = SETTINGS[name]
    known = dict(of.start) if name == "polaris" else {**fitted(config, "polaris"), **of.start}
    logs = [*filter(of.is_fitted_on, logs_of(config, name))]

    def off(values: Any) -> list[float]:
        constants = known | dict(zip(of.free, values, strict=True))
        pairs: list[tuple[float, float]] = []
        for log in logs:
            parts = predicted(config, of, log, constants)
            pairs += [(parts.step, log.step_s), (parts.update, log.update_s)]
            pairs += [(parts.passes + parts.copies, log.passes_s)]
        return [float(np.log(ours / theirs)) for ours, theirs in pairs]

    ends = [[BOUNDS[free][end] for free in of.free] for end in (0, 1)]
    from scipy.optimize import least_squares  # not where only tables are read

    best = least_squares(off, [known[free] for free in of.free], bounds=ends).x
    return known | {free: float(value) for free, value in zip(of.free, best, strict=True)}


def predicted(config: Config, of: Logs, log: Log, constants: Constants) -> Parts:
    """The parts of a log's step, with these constants."""
    ranks = log.tensor * log.data
    facts = tuple(constants[name] for name in FACTS)
    passes = _passes_s(
        config, of.cluster, facts, log.model, log.tensor, ranks, log.micro_batch, log.accumulation
    )
    of_node = min(NODE, ranks)
    update = min(constants["update"], constants["node_update"] / of_node)
    blocking = min(constants["blocking"], constants["node_blocking"] / of_node)
    beyond = log.ratio * log.model.parameters / ranks
    if log.system == "interleaved":
        ours = float(update_s(beyond, Rates(constants["link"], constants["link"], update), log.stride))
    else:
        ours = beyond * (UPDATE_BYTES / update + COPIED / constants["cast"]) / GIGA
    rate = blocking if log.system == "blocking copies" else constants["link"]
    return Parts(passes, COPIED * beyond / rate / GIGA, ours, constants["rest_s"])


@lru_cache(maxsize=4096)
def _passes_s(
    config: Config, cluster: str, facts: tuple[float, ...], model: ModelSpec, tensor: int, ranks: int,
    micro_batch: int, accumulation: int,
) -> float:  # fmt: skip
    """Seconds of forward and backward, which depend on the constants of FACTS alone: most steps of a fit
    change others. facts: their values"""
    constants = dict(zip(FACTS, facts, strict=True))
    paths = {BOUNDS[name][2]: value for name, value in constants.items()}
    paths |= {"stack.unit_us": 1e3 * constants["unit_ms"], "stack.overlap": OVERLAP}
    machine, stack = with_facts(*_hardware(config, cluster), paths)
    job = Workload(
        machine, stack, model, config.scheme("zero3"), ranks, micro_batch, SEQ_LEN, accumulation,
        axes=Ways(tensor=tensor),
    )  # fmt: skip
    step = step_time(job)
    return float(step.total - step.items["optimizer"])


@cache
def _hardware(config: Config, cluster: str) -> tuple[Machine, Stack]:
    """The machine with nodes of four, and DeepSpeed on it."""
    machine, stack = setting(config, cluster, "deepspeed-zero")
    inner, *outer = machine.levels
    levels = (inner.model_copy(update={"size": NODE}), *outer)
    return machine.model_copy(update={"levels": levels}), stack


@cache
def logs_of(config: Config, name: str) -> list[Log]:
    """The logs of a setting's folders."""
    found = []
    for url, of_log in reported(config, REPORTED).groupby("source_url", sort=False):
        folder, _, file = str(url).split(" ")[1].rpartition("/")
        if not re.search(SETTINGS[name].folders, folder):
            continue
        first, times = of_log.iloc[0], of_log.set_index("metric")["value"].astype(float) / 1e3
        layers, hidden, heads = map(int, re.findall(r"\d+", str(first["model"]).partition(":")[2]))

        def number(key: str, note: str = str(first["note"])) -> float:
            at = re.search(key + r" ([\d.]+)", note)
            return float(at[1] if at else 0)

        tensor, data, micro_batch = (int(number(key)) for key in ("tp", "dp", "micro-batch"))
        model = ModelSpec(
            name=str(first["model"]).partition(":")[0], layers=layers, hidden=hidden, heads=heads,
            vocab=VOCAB, seq_len=SEQ_LEN, source="arXiv 2410.21316, its logs; vocabulary ours",
        )  # fmt: skip
        found.append(
            Log(
                f"{folder.removeprefix('act-output-')}/{file}", SYSTEMS[first["system"]], model, tensor, data,
                micro_batch, int(first["batch"]) // (micro_batch * data), number("CPU ratio"),
                int(number("stride")), times["time, step"], times["time, update"],
                times["time, forward"] + times["time, backward"],
            )
        )  # fmt: skip
    return found
