"""Candidate tile sizes for the autotuner: the first call for a head size, a mask and a class of lengths times
them all.

A class is a power of two: lengths that round up to the same one share a tile, so lengths that vary from batch
to batch are seldom timed anew. The compiled code is the same for all classes. There are few tiles, so that
tuning takes seconds. The autotuner itself skips tiles that do not fit a device's shared memory. ROWS are
queries, COLUMNS are keys. `lowband bench-kernel --compile` compiles the first tile of each list.
"""

from collections.abc import Callable

import triton

from lowband.kernels.device import IS_HIP, IS_INTERPRETED

# (ROWS, COLUMNS, warps, stages), by device and head size. A block may use 163 (sm_80) or 227 KiB (sm_90) of
# shared memory on CUDA devices, and 64 KiB on CDNA, whose warps have 64 lanes.
Tile = tuple[int, int, int, int]
Tiles = dict[str, dict[int, list[Tile]]]

FORWARD: Tiles = {
    "cuda": {
        32: [(128, 64, 4, 3), (128, 128, 8, 3)],
        64: [(128, 64, 4, 3), (128, 128, 8, 3), (128, 64, 8, 3)],
        128: [(128, 64, 8, 3), (128, 128, 8, 2), (128, 128, 8, 3), (64, 64, 4, 3)],
        256: [(128, 64, 8, 2), (64, 32, 4, 2)],
    },
    "hip": {
        32: [(128, 64, 4, 1)],
        64: [(128, 64, 4, 1), (128, 32, 4, 2)],
        128: [(128, 64, 4, 1), (128, 32, 4, 1)],
        256: [(64, 32, 4, 1)],
    },
}
BACKWARD_KEYS: Tiles = {
    "cuda": {
        32: [(64, 128, 8, 2), (64, 64, 4, 2)],
        64: [(64, 128, 8, 2), (64, 64, 4, 3), (64, 64, 4, 2)],
        128: [(32, 128, 8, 2), (64, 128, 8, 2), (64, 64, 8, 2), (64, 64, 4, 2)],
        256: [(32, 64, 8, 1), (32, 32, 4, 1)],
    },
    "hip": {
        32: [(64, 64, 4, 1)],
        64: [(32, 128, 4, 1), (64, 64, 4, 1)],
        128: [(32, 64, 4, 1), (32, 128, 8, 1)],
        256: [(16, 32, 4, 1)],
    },
}
BACKWARD_QUERIES: Tiles = {
    "cuda": {
        32: [(128, 64, 4, 2)],
        64: [(128, 64, 8, 2), (64, 64, 4, 3), (128, 32, 4, 3)],
        128: [(128, 64, 8, 2), (128, 32, 8, 3), (64, 64, 4, 2)],
        256: [(64, 32, 8, 1), (32, 32, 4, 1)],
    },
    "hip": {
        32: [(64, 64, 4, 1)],
        64: [(128, 32, 4, 1), (64, 64, 4, 1)],
        128: [(64, 32, 4, 1), (128, 32, 8, 1)],
        256: [(32, 16, 4, 1)],
    },
}
# Arguments that the kernels themselves never read. They stand in the tuner's key, and in no compiled code's.
CLASSES = ("queries_class", "keys_class")
INTERPRETED: Tile = (64, 32, 1, 1)  # unequal, so that mixing up rows and columns fails


def classes(queries: int, keys: int) -> dict[str, int]:
    """The lengths' classes, as a tuned kernel takes them: the powers of two that they round up to."""
    return dict(zip(CLASSES, map(triton.next_power_of_2, (queries, keys)), strict=True))


def tuned(tiles: Tiles) -> Callable:
    """Decorator: a kernel with the constants HEAD, IS_CAUSAL, ROWS and COLUMNS, and the arguments CLASSES."""
    by_head = tiles["hip" if IS_HIP else "cuda"]
    if IS_INTERPRETED:
        by_head = {head: [INTERPRETED] for head in by_head}
    every = dict.fromkeys(tile for choices in by_head.values() for tile in choices)
    configs = {tile: _config(tile) for tile in every}

    def of_this_head(_configs: object, arguments: dict, HEAD: int, **_others: object) -> list[triton.Config]:
        return [configs[tile] for tile in by_head[HEAD]]

    tuner = triton.autotune(
        list(configs.values()),
        key=["HEAD", "IS_CAUSAL", *CLASSES],
        prune_configs_by={"early_config_prune": of_this_head},
    )
    # Specialised, a class of 1 would be a constant and one of 16 a multiple: the same code compiled again.
    return lambda kernel: tuner(triton.jit(kernel, do_not_specialize=CLASSES))


def _config(tile: Tile) -> triton.Config:
    rows, columns, warps, stages = tile
    return triton.Config({"ROWS": rows, "COLUMNS": columns}, num_warps=warps, num_stages=stages)
