"""What can give the numbers of arXiv 2501.04266: alternatives, each with what it leaves free, as a table.

An alternative changes the point of `frontier.at_point`: some constants or settings are stated, at most two
are free within bounds that have a source. The paper gives two independent ratios, so nothing is fitted to
fewer rows than constants; the scaling efficiency is never fitted. The best values are those of a grid, and
where they lie on a bound the alternative does not give the numbers.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from lowband.cost.numbers import Num
from lowband.evidence.validation import SOURCES, Setting
from lowband.evidence.validation.frontier import BASE_RANKS, RANKS, at_point
from lowband.evidence.validation.validate import with_facts
from lowband.predict.prediction import predict, speed
from lowband.predict.workload import Workload
from lowband.spec.axes import Ways
from lowband.spec.config import Config
from lowband.spec.scheme import Scheme
from lowband.spec.sourced import Bounds

WITHIN = 0.05  # of each ratio
EFFICIENCY_WITHIN = 0.03
POINTS = 97  # of the grid, per free value

NODE, WORLD, OVERLAP = "stack.efficiency.node", "stack.efficiency.world", "stack.overlap"
PUBLISHED: Mapping[str, float] = {NODE: 1, WORLD: 1}  # links as micro-benchmarks found them
LINK = Bounds(
    low=0.03, high=1, source="PCCL is up to 33 times as fast as RCCL; the rate measured on the link"
)
SHARE = Bounds(low=0, high=1, source="a share")
PASSES = Bounds(low=1, high=64, source="64 sequences per GCD and step: a global batch of 24,576")
HOOKS = Bounds(low=0, high=6000, source="six hooks of a block, 1 ms each (pytorch issue 173680)")
STEP_US = Bounds(low=2.5, high=80, source="2.5 us between nodes on Frontier, 80 us a node on 2019's EFA")
PRODUCTS = Bounds(low=0.384, high=0.653, source="whole steps; AxoNN's GEMM (06_frontier_node_facts.csv)")


@dataclass(frozen=True)
class Alternative:
    """free: places of facts, or fields of Workload, with bounds; two places in one key share one value."""

    name: str
    free: Mapping[str, Bounds] = field(default_factory=dict)
    facts: Mapping[str, float] = field(default_factory=dict)
    job: Mapping[str, Any] = field(default_factory=dict)
    hier3: str = "hier3"
    plausibility: str = ""


ALTERNATIVES = (
    Alternative(
        "links as published, nothing hidden", facts=PUBLISHED,
        plausibility="the ratios need slower links, or more passes",
    ),
    Alternative(
        "links as published, more passes", {"accumulation": PASSES}, PUBLISHED,
        plausibility="batches of millions of tokens are usual",
    ),
    Alternative(
        "links as published, more passes, overlap", {"accumulation": PASSES, OVERLAP: SHARE}, PUBLISHED,
        plausibility="as above; hiding costs hier3's advantage",
    ),
    Alternative(
        "links as published, host waits at hooks", {"stack.unit_us": HOOKS}, PUBLISHED,
        plausibility="the same for all schemes: it lowers ratios",
    ),
    Alternative(
        "links as published, slow ring steps between nodes", {"world.latency_us": STEP_US}, PUBLISHED,
        plausibility="RCCL's tuner has 19.8 us; a ring of 384 has 48 such steps",
    ),
    Alternative(
        "links as published, slow products", {"device.matmul_efficiency": PRODUCTS}, PUBLISHED,
        plausibility="Dash et al. reached 38 % of the peak in whole steps",
    ),
    Alternative(
        "slow links between nodes only", {WORLD: LINK}, {NODE: 1},
        plausibility="LUMI's RCCL reached 75 % of its cards (De Sensi et al.)",
    ),
    Alternative(
        "slow links in a node only", {NODE: LINK}, {WORLD: 1},
        plausibility="RCCL goodput below half of MPI's between packages (De Sensi et al.)",
    ),
    Alternative(
        "one share of all links", {f"{NODE} {WORLD}": LINK},
        plausibility="one cause for both: rings without pipelining, copies, one channel",
    ),
    Alternative(
        "one share of all links, other passes", {f"{NODE} {WORLD}": LINK, "accumulation": PASSES},
        plausibility="the paper's batch is not in the material",
    ),
    Alternative(
        "one share of all links, a third hidden", {f"{NODE} {WORLD}": LINK}, {OVERLAP: 0.315},
        plausibility="what fits DeepSpeed's overlap on 384 V100",
    ),
    Alternative(
        "one share of all links, no recomputation", {f"{NODE} {WORLD}": LINK}, job={"recompute": "none"},
        plausibility="fits the memory at micro-batch 1",
    ),
    Alternative(
        "two shares of links (fitted again)", {NODE: LINK, WORLD: LINK},
        plausibility="an eighth of the links; PCCL found 1/33 at 2,048 GCDs",
    ),
    Alternative(
        "two shares of links, one pass", {NODE: LINK, WORLD: LINK}, job={"accumulation": 1},
        plausibility="hier3's step would lose its advantage between nodes",
    ),
    Alternative(
        "two shares of links, 16 passes", {NODE: LINK, WORLD: LINK}, job={"accumulation": 16},
        plausibility="usual for a 20B model on 384 GCDs (12M tokens a step)",
    ),
    Alternative(
        "two shares of links, micro-batch 4", {NODE: LINK, WORLD: LINK},
        job={"micro_batch": 4, "accumulation": 1}, plausibility="fewer, longer passes",
    ),
    Alternative(
        "two shares of links, all hidden", {NODE: LINK, WORLD: LINK}, {OVERLAP: 1},
        plausibility="DeepSpeed prefetches by default",
    ),
    Alternative(
        "two shares of links, hop by hop", {NODE: LINK, WORLD: LINK}, job={"collectives": "hops"},
        plausibility="ZeRO over RCCL runs one ring; only hpZ and qgZ have levels",
    ),
    Alternative(
        "two shares of links, units gathered once a step", {NODE: LINK, WORLD: LINK},
        job={"axes": Ways(schedule="breadth-first")}, plausibility="DeepSpeed has no breadth-first order",
    ),
    Alternative(
        "two shares of links, hier3 unquantized", {NODE: LINK, WORLD: LINK}, hier3="hier3-exact",
        plausibility="the abstract does not say what hier3 quantizes",
    ),
)  # fmt: skip


def alternatives(config: Config) -> pd.DataFrame:
    """One row per alternative: its best values, the ratios, the efficiency, and whether it gives them.

    gives: both ratios within 5 %, the efficiency within 0.03, and no free value on its bound
    fits:  whether every scheme fits a GCD's memory
    """
    setting = SOURCES["frontier"].setting(config)
    published = published_ratios(config)
    return pd.DataFrame([row(setting, one, published, config.scheme(one.hier3)) for one in ALTERNATIVES])


def published_ratios(config: Config) -> dict[str, float]:
    """The paper's ratios and its efficiency, by the names of their rows."""
    source = SOURCES["frontier"]
    rows = source.rows(config, *source.on(config))
    return {row.id.removeprefix("frontier: "): row.published for row in rows}


def row(setting: Setting, one: Alternative, published: Mapping[str, float], ours: Scheme) -> dict[str, Any]:
    """The row of an alternative in which `ours` is the three-level scheme."""
    grid = dict(zip(one.free, np.meshgrid(*map(_points, one.free.values()), indexing="ij"), strict=True))
    zero3_zeropp = [setting.scheme(name) for name in ("zero3", "zeropp")]
    runs = (*((scheme, RANKS) for scheme in zero3_zeropp), (ours, RANKS), (ours, BASE_RANKS))
    rates = [speed(_job(setting, one, grid, *run)).tflops_per_gpu for run in runs]
    zero3, zeropp, hier3, base = np.broadcast_arrays(*rates)
    ratios = {"ZeRO++ / ZeRO-3": zeropp / zero3, "hier3 / ZeRO++": hier3 / zeropp}
    off = {name: ratio / published[name] - 1 for name, ratio in ratios.items()}
    best = np.unravel_index(np.argmin(sum(np.square(error) for error in off.values())), zero3.shape)
    values = {place: float(at[best]) for place, at in grid.items()}
    inside = all(bounds.place(values[place]) == "inside" for place, bounds in one.free.items())
    worst = max(abs(float(error[best])) for error in off.values())
    efficiency = float((hier3 / base)[best])
    holds = worst <= WITHIN and abs(efficiency - published["hier3 efficiency"]) <= EFFICIENCY_WITHIN
    jobs = [_job(setting, one, values, scheme, RANKS) for scheme in (*zero3_zeropp, ours)]
    return {
        "provenance": "predicted",
        **setting.names,
        "alternative": one.name,
        "free": len(one.free),
        "values": ", ".join(f"{place} = {value:.3g}" for place, value in values.items()),
        "place": "inside" if inside else "on a bound",
        "bounds_source": "; ".join(dict.fromkeys(bounds.source for bounds in one.free.values())),
        "ratio_zeropp_zero3": float(ratios["ZeRO++ / ZeRO-3"][best]),
        "ratio_hier3_zeropp": float(ratios["hier3 / ZeRO++"][best]),
        "ratio_hier3_zero3": float((hier3 / zero3)[best]),
        "efficiency": efficiency,
        "largest_error_percent": 100 * worst,
        "tflops_hier3": float(hier3[best]),
        "fits": all(bool(predict(job, interval=False).fits) for job in jobs),
        "gives": holds and inside,
        "plausibility": one.plausibility,
    }


def _points(bounds: Bounds) -> NDArray[Any]:
    """Values between the bounds, evenly spaced in their logarithm where they can have one."""
    spaced = np.geomspace if bounds.low > 0 else np.linspace
    points = spaced(bounds.low, bounds.high, POINTS)
    return np.unique(points.round()) if bounds is PASSES else points


def _job(
    setting: Setting, one: Alternative, values: Mapping[str, Num], scheme: Scheme, ranks: int
) -> Workload:
    """The point with the alternative's facts and settings."""
    fields: dict[str, Any] = {place: value for place, value in values.items() if "." not in place}
    facts = {fact: value for place, value in values.items() if "." in place for fact in place.split()}
    machine, stack = with_facts(setting.machine, setting.stack, {**one.facts, **facts})
    at = replace(setting, machine=machine, stack=stack)
    return replace(at_point(at, "zero3", ranks), scheme=scheme, **one.job, **fields)
