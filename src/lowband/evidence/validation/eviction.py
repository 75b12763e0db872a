"""How far eviction by next use is from the least that can move, and what other orders swap: tables.

Small cases are drawn with a fixed seed: 4 to 8 chunks, 10 to 24 accesses, room for less than all. Their least
is the exact optimum of cost/eviction.py. A step in steady state is that of a GPT's units, forward and back.
"""

import random

import pandas as pd

from lowband.cost.eviction import (
    RULES,
    Access,
    counted_swaps,
    moved,
    optimum,
    order_of_step,
    swaps_grouped,
    swaps_virtual,
    virtual_order,
)

SEED, CASES = 38, 150
KINDS = {  # name -> whether sizes differ, whether accesses write
    "equal chunks": (False, False), "unequal sizes": (True, False), "write-backs": (False, True),
    "both": (True, True),
}  # fmt: skip
UNITS, ROOMS = 48, (8, 16, 24, 32, 40)
LAYERS, MICRO_BATCHES, RANKS = 48, (1, 2, 4, 8, 16, 32), (1, 4, 8)


def eviction_gaps() -> pd.DataFrame:
    """A row per kind of case and rule: bytes moved beyond the exact optimum, in percent of it."""
    rows = []
    for kind, (differ, write) in KINDS.items():
        rng = random.Random(SEED)
        cases = [_case(rng, differ, write) for _ in range(CASES)]
        least = [optimum(*case) for case in cases]
        for rule in RULES:
            found = [moved(*case, rule).total for case in cases]
            over = pd.Series([100 * (ours / best - 1) for ours, best in zip(found, least, strict=True)])
            rows.append(
                {
                    "provenance": "predicted", "kind": kind, "rule": rule, "cases": CASES,
                    "at_the_least": int((over == 0).sum()), "mean_over_percent": over.mean(),
                    "max_over_percent": over.max(),
                }
            )  # fmt: skip
    return pd.DataFrame(rows)


def _case(rng: random.Random, differ: bool, write: bool) -> tuple[list[Access], dict[str, int], int]:
    chunks = [f"c{i}" for i in range(rng.randint(4, 8))]
    sizes = {chunk: rng.randint(1, 8) if differ else 1 for chunk in chunks}
    order = [Access(rng.choice(chunks), write and rng.random() < 0.4) for _ in range(rng.randint(10, 24))]
    used = {access.chunk for access in order}
    largest, all_ = max(sizes[chunk] for chunk in used), sum(sizes[chunk] for chunk in used)
    return order, sizes, rng.randint(largest, max(largest, all_ - 1))


def eviction_steps() -> pd.DataFrame:
    """A row per room and rule: chunks of equal size fetched in a step in steady state, and the bound.

    bound: 2 (n - c) for n chunks of which c fit, what each way must fetch again (tests/unit/test_eviction.py)
    """
    order = order_of_step([f"u{i}" for i in range(UNITS)])
    sizes = {access.chunk: 1 for access in order}
    return pd.DataFrame(
        [
            {
                "provenance": "predicted", "chunks": UNITS, "room": room, "rule": rule,
                "fetches": moved(order, sizes, room, rule, steps=4).fetches, "bound": 2 * (UNITS - room),
            }
            for room in ROOMS
            for rule in RULES
        ]
    )  # fmt: skip


def eviction_swaps() -> pd.DataFrame:
    """A row per number of micro-batches and ranks: layers' weights that all ranks swap in a step.

    virtual: each rank has all layers (data parallelism) and virtual memory; grouped: the same, grouped;
    pipeline: each rank has its own layers, grouped. counted: of virtual, task by task
    """
    rows = []
    for micro_batches in MICRO_BATCHES:
        counted = counted_swaps(virtual_order(LAYERS, micro_batches))
        for ranks in RANKS:
            virtual, pipeline = ranks * swaps_virtual(LAYERS, micro_batches), swaps_grouped(LAYERS // ranks)
            rows.append(
                {
                    "provenance": "predicted", "layers": LAYERS, "micro_batches": micro_batches,
                    "ranks": ranks, "virtual": virtual, "counted": ranks * counted,
                    "grouped": ranks * swaps_grouped(LAYERS), "pipeline": ranks * pipeline,
                    "times": virtual / (ranks * pipeline),
                }
            )  # fmt: skip
    return pd.DataFrame(rows)
