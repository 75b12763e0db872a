"""FSMoE's 1,458 layers on its testbed A (arXiv 2501.10714, section 6.3), each by four schedules.

A layer is attention, cut over the 8 GPUs of a node, and experts, one a node, cut over its GPUs. Of B x L
tokens of M values n = k f B L M travel: dispatched (between nodes), gathered (inside), multiplied, reduced
(inside), combined (between), in r chunks; attention's output is reduced and gathered inside a node, too, B L
M values.
Every exchange takes alpha + n beta as printed in Figure 5, every product as stated there: 2.29e-11 ms an
operation, which we take for a FLOP (43.7 TFLOPS). A chunk's exchanges are a (between), g and s (inside), its
products e. With r chunks a layer of experts takes the longest of

    one channel  r (2 a + g + s) + w     2 a + g + s + r e     r (a + g) + e + s + a
    two          2 r a + w               2 a + g + s + r e     2 r a + g + s         2 a + r (g + s)

the second the paper's cases 1 to 4; w: of the sum of gradients, what is put beside the experts.

    Tutel (PipeMoE)   one channel, r the same forward and backward, the sum of gradients behind all
    Tutel-Improved    which is beside attention
    without overlap   of channels: r apart; the sum beside attention, and what is left beside experts
    FSMoE             two channels

Two printed slopes are ten times what those beside them are. Table 2's times decide: the gather takes as long
as the reduction, so its slope should be a tenth; the sum of gradients takes to three digits what the printed
slope gives for attention's own. All readings are shown. Not printed: f of layers that drop no token, taken
as 1; the loss of kernels between products; top k, taken as in section 6.4.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any  # of numpy's arrays and pandas' rows, which have no static types

import numpy as np

GPUS, TOP_K = 8, 2  # of a node
PRODUCT = (4.26e-2, 2.29e-11)  # ms, ms a FLOP: Figure 5 (a), which is not among the reported rows
CHUNKS = np.arange(1, 33)
ROWS = {"all-to-all": "a2a", "all-gather": "gather", "reduce-scatter": "reduce", "all-reduce": "sum"}
READINGS = {"as printed": (), "gather's slope / 10": ("gather",), "sum's slope / 10": ("sum",),
            "both / 10": ("gather", "sum")}  # fmt: skip
SCHEDULES = ("Tutel (PipeMoE)", "Tutel-Improved", "FSMoE without inter/intra overlap", "FSMoE")

Line = tuple[float, float]


@dataclass(frozen=True)
class Layers:
    """All configurations as arrays, [layers, 1]. tokens: B L; length: L; factor: f, 1 for none dropped"""

    tokens: Any
    length: Any
    hidden: Any
    width: Any
    factor: Any
    products: Any


def layers() -> Layers:
    """Table 4; heads change nothing here."""
    of = product((1, 2, 4), (512, 1024, 2048), (1024, 2048, 4096), (2, 3, 4), (1.2, 2.4, 1.0), (2, 3))
    b, length, hidden, scale, factor, products = (np.array(each)[:, None] for each in zip(*of, strict=True))
    return Layers(b * length, length, hidden, scale * hidden, factor, products)


def lines(reported: Any) -> dict[str, Line]:
    """alpha and beta of each exchange, ms. reported: rows of 14_experts.csv"""
    found = {}
    for row in reported.itertuples():
        if row.metric.startswith("alpha and beta") and "testbed A" in row.hardware and row.system in ROWS:
            alpha, beta = (float(each) for each in str(row.value).split(" and "))
            found[ROWS[row.system]] = alpha, beta
    return found


def read_as(given: dict[str, Line], reading: str) -> dict[str, Line]:
    return {
        name: (alpha, beta / 10 if name in READINGS[reading] else beta)
        for name, (alpha, beta) in given.items()
    }


def times_ms(of: Layers, line: dict[str, Line]) -> dict[str, Any]:
    """Of a step of each layer, by schedule, [layers]."""

    def t(name: str, n: Any, r: Any = 1) -> Any:
        return line[name][0] + n / r * line[name][1]

    values = TOP_K * of.factor * of.tokens * of.hidden
    a, g, s = (t(name, values, CHUNKS) for name in ("a2a", "gather", "reduce"))
    flops = 2 * TOP_K * of.factor * of.tokens * of.hidden * of.width / GPUS
    e = of.products * (PRODUCT[0] + flops / CHUNKS * PRODUCT[1])
    inside = t("reduce", of.tokens * of.hidden) + t("gather", of.tokens * of.hidden)
    scores = 2 * 2 * of.tokens * of.length * of.hidden / GPUS
    attention = 6 * PRODUCT[0] + (8 * of.tokens * of.hidden**2 / GPUS + scores) * PRODUCT[1]
    forward, backward = inside + attention, inside + 2 * attention
    gradients = t("sum", 4 * of.hidden**2 / GPUS)
    beside = np.maximum(gradients - backward, 0)

    def one(e: Any, w: Any = 0.0) -> Any:
        return _longest(
            CHUNKS * (2 * a + g + s) + w, 2 * a + g + s + CHUNKS * e, CHUNKS * (a + g) + e + s + a
        )

    def two(e: Any, w: Any = 0.0) -> Any:
        both = CHUNKS * (g + s)
        return _longest(2 * CHUNKS * a + w, 2 * a + g + s + CHUNKS * e, 2 * CHUNKS * a + g + s, 2 * a + both)

    dense = (forward + backward)[:, 0]
    tutel = dense + (one(e) + one(2 * e)).min(axis=1)
    apart = {
        name: dense + way(e).min(axis=1) + way(2 * e, beside).min(axis=1)
        for name, way in (("one", one), ("two", two))
    }
    of_each = tutel + gradients[:, 0], tutel + beside[:, 0], apart["one"], apart["two"]
    return dict(zip(SCHEDULES, of_each, strict=True))


def _longest(*each: Any) -> Any:
    return np.max(np.broadcast_arrays(*each), axis=0)


def speedups(reported: Any) -> Iterator[tuple[str, str, float]]:
    """(reading, schedule, mean speedup over the first schedule), by all readings of the printed slopes."""
    of, given = layers(), lines(reported)
    for reading in READINGS:
        found = times_ms(of, read_as(given, reading))
        for name in SCHEDULES[1:]:
            yield reading, name, float((found[SCHEDULES[0]] / found[name]).mean())
