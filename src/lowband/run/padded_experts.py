"""What padding of experts' rows wastes: rows counted, and products on this machine timed, in turns.

Tokens choose experts by Zipf's law, each expert once (skew 0: all alike). Ways to multiply what came:

    grouped      as many rows as pairs (engine.parallel.expert_products)
    loop         the same, one expert after the other
    padded       a batch of products, of as many rows for each expert as the fullest has: Tutel's dropless
    capacity c   the same, of c times the mean for each: later pairs of an expert are dropped, as in GShard

Source: MegaBlocks (arXiv 2211.15841, sections 2 and 3), whose dropless layers this compares with padded ones.
"""

import math
import time
from collections.abc import Iterator
from itertools import product
from typing import NamedTuple

import torch
import torch.nn.functional as F

from lowband.engine.parallel.expert_products import products
from lowband.spec.routing import Routing

HIDDEN, WIDTH, TOKENS = 256, 512, 4096
SHAPES = [(64, 1), (8, 2)]  # experts, top k: MegaBlocks', Mixtral's
SKEWS = (0.0, 0.5, 1.0, 1.5)
CAPACITIES = (1.0, 1.25, 1.5, 2.0)
WAYS = ("grouped", "loop", "padded", *(f"capacity {each:g}" for each in CAPACITIES))
REPEATS = 5


class Counted(NamedTuple):
    """rows: multiplied; padding: of these, rows of no pair; dropped: pairs that are not multiplied"""

    experts: int
    top_k: int
    skew: float
    way: str
    pairs: int
    rows: int
    padding: int
    dropped: int


class Timed(NamedTuple):
    """took_s: of a forward and backward of all experts' products, with what puts rows in their places"""

    experts: int
    top_k: int
    skew: float
    way: str
    repeat: int
    took_s: float


def measure() -> tuple[list[Counted], list[Timed]]:
    """Count all ways, then time them; of a shape and skew all ways in turns, once untimed."""
    cases = [*product(SHAPES, SKEWS)]
    counted = [row for (experts, top_k), skew in cases for row in count(experts, top_k, skew)]
    return counted, [row for (experts, top_k), skew in cases for row in _times(experts, top_k, skew)]


def chosen(experts: int, top_k: int, skew: float) -> torch.Tensor:
    """[TOKENS top_k] int64: experts of all pairs, in the order of tokens."""
    shares = (1 + torch.arange(experts, dtype=torch.float64)) ** -skew
    generator = torch.Generator().manual_seed(experts)
    return torch.multinomial(shares.expand(TOKENS, -1), top_k, generator=generator).flatten()


def most_rows(way: str, counts: torch.Tensor, top_k: int) -> int | None:
    """Rows that each expert has; None: its own number."""
    if way in ("grouped", "loop"):
        return None
    if way == "padded":
        return int(counts.max())
    return Routing(len(counts), top_k, capacity=float(way.split()[1])).most_pairs(TOKENS)


def count(experts: int, top_k: int, skew: float) -> Iterator[Counted]:
    counts = torch.bincount(chosen(experts, top_k, skew), minlength=experts)
    pairs = int(counts.sum())
    for way in WAYS:
        most = most_rows(way, counts, top_k)
        kept = pairs if most is None else int(counts.clamp(max=most).sum())
        rows = pairs if most is None else experts * most
        yield Counted(experts, top_k, skew, way, pairs, rows, rows - kept, pairs - kept)


def computed(
    way: str, x_PH: torch.Tensor, counts: torch.Tensor, top_k: int, up: torch.Tensor, down: torch.Tensor
) -> torch.Tensor:
    """[P, H]: outputs of experts, zeros of dropped pairs.

    x_PH: sorted by expert; up: [experts, width, H]; down: [experts, H, width]
    """
    most = most_rows(way, counts, top_k)
    if way == "loop":
        parts = zip(x_PH.split(counts.tolist()), up, down, strict=True)
        return torch.cat([F.silu(part @ a.mT) @ b.mT for part, a, b in parts])
    if most is None:
        return products(x_PH, counts, up, down)
    experts = torch.arange(len(counts)).repeat_interleave(counts)
    places = torch.arange(len(x_PH)) - (counts.cumsum(0) - counts)[experts]
    kept = places < most
    experts, places = experts[kept], places[kept]
    x_EMH = x_PH.new_zeros(len(counts), most, x_PH.shape[1]).index_put((experts, places), x_PH[kept])
    found = torch.bmm(F.silu(torch.bmm(x_EMH, up.mT)), down.mT)[experts, places]
    return x_PH.new_zeros(len(x_PH), x_PH.shape[1]).index_copy(0, kept.nonzero().squeeze(1), found)


def _times(experts: int, top_k: int, skew: float) -> Iterator[Timed]:
    torch.manual_seed(0)
    counts = torch.bincount(chosen(experts, top_k, skew), minlength=experts)
    x = torch.randn(int(counts.sum()), HIDDEN, requires_grad=True)
    up = torch.randn(experts, WIDTH, HIDDEN).div_(math.sqrt(HIDDEN)).requires_grad_()
    down = torch.randn(experts, HIDDEN, WIDTH).div_(math.sqrt(WIDTH)).requires_grad_()
    grad = torch.randn(len(x), HIDDEN)
    for repeat, way in product(range(REPEATS + 1), WAYS):
        start = time.monotonic()
        computed(way, x, counts, top_k, up, down).backward(grad)
        took_s = time.monotonic() - start
        x.grad = up.grad = down.grad = None
        if repeat:
            yield Timed(experts, top_k, skew, way, repeat, took_s)
