"""Seconds of one matrix product from its shape: arithmetic of whole tiles, moving or copying its operands.

    roofline   max(flops / peak, bytes / rate) + fixed
    packed     flops / peak + copied / rate + fixed

A kernel computes tiles of so many rows and columns in registers; a tile that is not full takes as long. A
BLAS on a processor first copies both factors into the order of its tiles, which nothing hides (Goto and
van de Geijn, Anatomy of High-Performance Matrix Multiplication, 2008, doi 10.1145/1356052.1356053).
"""

from typing import NamedTuple

import numpy as np

from lowband.cost.numbers import Num


class Tile(NamedTuple):
    """Rows and columns that a kernel computes at once."""

    rows: int
    columns: int


ONE = Tile(1, 1)  # no tiles


def tiled_flops(rows: Num, columns: Num, inner: Num, tile: Tile = ONE) -> Num:
    """FLOPs of a product whose rows and columns are rounded up to whole tiles."""
    tiles = np.ceil(np.asarray(rows) / tile.rows) * np.ceil(np.asarray(columns) / tile.columns)
    return 2 * tile.rows * tile.columns * tiles * inner


def roofline_s(flops: Num, moved: Num, peak: float, rate: Num, fixed_s: float) -> Num:
    """flops: of whole tiles; moved: bytes of the operands; peak in FLOP/s, rate in bytes/s"""
    return np.maximum(flops / peak, moved / rate) + fixed_s


def packed_s(flops: Num, copies_s: Num, peak: float, fixed_s: float) -> Num:
    """copies_s: seconds in which both factors are copied, and the product read and written"""
    return flops / peak + copies_s + fixed_s
