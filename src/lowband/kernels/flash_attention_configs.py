"""Candidate tile sizes for the autotuner: the first call for a head size, a mask and a class of lengths times
all those of the head's width.

A class is a power of two: lengths that round up to the same one share a tile, so lengths that vary from batch
to batch are seldom timed anew. The compiled code is the same for all classes. There are few tiles, so that
tuning takes seconds. The autotuner itself skips tiles that do not fit a device's shared memory. ROWS are
queries, COLUMNS are keys. `lowband bench-kernel --compile` compiles the first tile of each list.
"""

from collections.abc import Callable

import triton

from lowband.kernels.device import IS_HIP, IS_INTERPRETED

# (ROWS, COLUMNS, warps, stages), by device and width. A block may use 163 (sm_80) or 227 KiB (sm_90) of
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


def width(head: int) -> int:
    """The power of two that a head is computed as."""
    return max(min(FORWARD["cuda"]), triton.next_power_of_2(head))


def tuned(tiles: Tiles) -> Callable:
    """Decorator: a kernel with the constants HEAD, WIDTH, MASK, IS_CAPPED, ROWS and COLUMNS, and CLASSES."""
    by_width = tiles["hip" if IS_HIP else "cuda"]
    if IS_INTERPRETED:
        by_width = {width: [INTERPRETED] for width in by_width}
    every = dict.fromkeys(tile for choices in by_width.values() for tile in choices)
    configs = {tile: _config(tile) for tile in every}

    def of_its_width(_configs: object, arguments: dict, WIDTH: int, **_others: object) -> list[triton.Config]:
        return [configs[tile] for tile in by_width[WIDTH]]

    tuner = triton.autotune(
        list(configs.values()),
        key=["HEAD", "MASK", "IS_CAPPED", *CLASSES],
        prune_configs_by={"early_config_prune": of_its_width},
    )
    # Specialised, a class of 1 would be a constant and one of 16 a multiple: the same code compiled again.
    return lambda kernel: tuner(triton.jit(kernel, do_not_specialize=CLASSES))


def _config(tile: Tile) -> triton.Config:
    rows, columns, warps, stages = tile
    return triton.Config({"ROWS": rows, "COLUMNS": columns}, num_warps=warps, num_stages=stages)
