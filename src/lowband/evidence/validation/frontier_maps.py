"""What-ifs as tables: where the Frontier ratios hold, and how schemes scale with ranks and slower links."""

from bisect import bisect_left
from dataclasses import replace
from itertools import product

import numpy as np
import pandas as pd

from lowband.evidence.validation import SOURCES
from lowband.evidence.validation.frontier import ACCUMULATION, at_point
from lowband.evidence.validation.validate import with_facts
from lowband.predict.prediction import predict
from lowband.predict.workload import Workload
from lowband.spec.config import Config
from lowband.spec.mesh import WORLD
from lowband.spec.model import ModelSpec

FRONTIER = SOURCES["frontier"]
TARGETS = {  # column -> the published row it is compared with
    "ratio_zeropp_zero3": "frontier: ZeRO++ / ZeRO-3",
    "ratio_hier3_zeropp": "frontier: hier3 / ZeRO++",
}
WITHIN = 0.05

# The map's axes: sequences per GCD and step, and the rate, out of 100 GB/s, that a node's cards reach in the
# sharding's collectives; the point's other settings stay. Two cases of overlap, with published link rates in
# a node and with the fitted one.
BATCHES = (1, 2, 4, 8, 16, 32, 64)
NODE_GIGABYTES_PER_S = np.geomspace(4, 90, 28)

SCALE_SCHEMES = ("zero2", "zero3", "hpz", "zeropp", "hsdp", "hier3")
SCALE_RANKS = (8, 16, 32, 64, 128, 256, 384, 512, 1024, 2048, 4096, 8192, 16384, 37632, 75264)
SLOWER = (1, 10)
LARGEST_RANKS = (8, 64, 384, 3072)
MOST_LAYERS = 4096


def frontier_map(config: Config) -> pd.DataFrame:
    """Ratios of TFLOPS per GCD at 384 GCDs, on a grid of batch and achieved outer bandwidth; micro-batch 1.

    One row per point; `holds`: both ratios within 5 % of the published ones, `published_...`.
    """
    base = FRONTIER.setting(config)
    link = base.machine.link(WORLD)
    assert link.efficiency is not None
    fitted = base.stack.facts["stack.efficiency.node"].value
    reached = link.gigabytes_per_s * link.efficiency.value * base.machine.node_size
    accumulation, rate = np.meshgrid(BATCHES, NODE_GIGABYTES_PER_S, indexing="ij")
    frames = []
    for (inside, node), overlap in product((("fitted", fitted), ("published", 1.0)), (0.0, 1.0)):
        facts = {"stack.overlap": overlap, "stack.efficiency.node": node, "stack.efficiency.world": 1.0}
        setting = replace(base, stack=with_facts(base.machine, base.stack, facts)[1])
        tflops = {}
        for scheme in ("zero3", "zeropp", "hier3"):
            job = replace(
                at_point(setting, scheme), accumulation=accumulation, faster={WORLD: rate / reached}
            )
            tflops[scheme] = predict(job, interval=False).tflops_per_gpu
        frames.append(
            pd.DataFrame(
                {
                    **base.names, "links_in_node": inside, "overlap": overlap,
                    "batch_per_gcd": accumulation.ravel(), "node_gigabytes_per_s": rate.ravel(),
                    "ratio_zeropp_zero3": np.ravel(tflops["zeropp"] / tflops["zero3"]),
                    "ratio_hier3_zeropp": np.ravel(tflops["hier3"] / tflops["zeropp"]),
                }
            )
        )  # fmt: skip
    df = pd.concat(frames, ignore_index=True)
    published = {row.id: row.published for row in FRONTIER.rows(config, base.machine, base.stack)}
    off = [(df[column] / published[row] - 1).abs() for column, row in TARGETS.items()]
    df["holds"] = (off[0] <= WITHIN) & (off[1] <= WITHIN)
    for column, row in TARGETS.items():
        df[f"published_{column}"] = published[row]
    point = base.stack.facts["stack.efficiency.world"].value * reached
    df["point_batch_per_gcd"] = ACCUMULATION
    df["point_node_gigabytes_per_s"] = point
    return df


def scale(config: Config) -> pd.DataFrame:
    """TFLOPS per GCD of the 20B model on 8 to 75,264 GCDs, with node-to-node links as they are and ten times
    slower; batch per GCD as at the point. Slow and fast: constants at the ends of their intervals."""
    setting = FRONTIER.setting(config)
    found = []
    for slower, scheme, ranks in product(SLOWER, SCALE_SCHEMES, SCALE_RANKS):
        p = predict(replace(at_point(setting, scheme, ranks), faster={WORLD: 1 / slower}))
        found.append(
            {
                **setting.names, "slower": slower, "scheme": scheme, "ranks": ranks,
                "tflops_per_gpu": float(p.tflops_per_gpu),
                "tflops_per_gpu_slow": float(p.tflops_per_gpu * p.step_time_s / p.step_time_slow_s),
                "tflops_per_gpu_fast": float(p.tflops_per_gpu * p.step_time_s / p.step_time_fast_s),
                "peak_memory_bytes": float(p.peak_memory_bytes), "fits": bool(p.fits),
            }
        )  # fmt: skip
    df = pd.DataFrame(found)
    fitting = df["tflops_per_gpu"].where(df["fits"])
    df["wins"] = fitting == fitting.groupby([df["slower"], df["ranks"]]).transform("max")
    return df


def largest(config: Config) -> pd.DataFrame:
    """The largest GPT of the 20B model's width that fits a GCD, per scheme: only its depth changes."""
    setting = FRONTIER.setting(config)
    found = []
    for scheme, ranks in product(SCALE_SCHEMES, LARGEST_RANKS):
        job = at_point(setting, scheme, ranks)

        def model(layers: int, of: ModelSpec = job.model) -> ModelSpec:
            return of.model_copy(update={"layers": layers})

        def is_too_deep(layers: int, job: Workload = job) -> bool:
            return not predict(replace(job, model=model(layers)), interval=False).fits

        layers = bisect_left(range(1, MOST_LAYERS), True, key=is_too_deep)
        parameters = model(layers).parameters if layers else 0
        found.append(
            {**setting.names, "scheme": scheme, "ranks": ranks, "layers": layers, "parameters": parameters}
        )
    return pd.DataFrame(found)
