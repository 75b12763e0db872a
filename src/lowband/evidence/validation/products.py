"""Products measured on a processor beside their predictions from facts of the same run; nothing is fitted.

Each fact is the least time of its rounds: the peak from a large square, the fixed time from a product of
single values, the rate of memory from copies, between their sizes interpolated in logarithms. A product with
a vector is not packed (BLAS has a routine of its own for it).
"""

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from lowband.cost.products import ONE, Tile, packed_s, roofline_s, tiled_flops

SHAPE = ["kind", "rows", "columns", "inner"]
FACTS = ("peak", "fixed", "copy")
METHODS = {  # column of a prediction -> what it is
    "peak": "FLOPs at the peak",
    "roofline": "roofline",
    "packing": "copies of both factors",
    "tiles": "copies, whole tiles",
}
VALUE = 4  # bytes


def compare(timings: pd.DataFrame) -> pd.DataFrame:
    """One row per shape: measured_s, the least of its rounds, and predicted seconds by each of METHODS.

    timings: rows of `bench/products.py`
    """
    least = timings.groupby(SHAPE, sort=False)["time_s"].min().reset_index(name="measured_s")
    facts = {kind: least[least["kind"] == kind] for kind in FACTS}
    fixed_s = float(facts["fixed"]["measured_s"].iloc[0])
    copies = facts["copy"].sort_values("columns")
    sizes = VALUE * copies["columns"].to_numpy(float)
    copy_s = copies["measured_s"].to_numpy()

    def copied(values: NDArray[np.float64]) -> NDArray[np.float64]:
        """Seconds to copy so many values."""
        size = VALUE * values
        found: NDArray[np.float64] = size * np.exp(
            np.interp(np.log(size), np.log(sizes), np.log(copy_s / sizes))
        )
        return found

    def packed(shape: NDArray[np.float64]) -> NDArray[np.float64]:
        rows, columns, inner = shape
        return copied(rows * inner) + copied(inner * columns) + copied(rows * columns)

    square = float(facts["peak"]["rows"].iloc[0])
    flops, peak_s = 2 * square**3, float(facts["peak"]["measured_s"].iloc[0]) - fixed_s
    peak = flops / peak_s
    packed_peak = flops / (peak_s - float(packed(np.full((3, 1), square))[0]))
    out = least[~least["kind"].isin(FACTS)].reset_index(drop=True)
    shape = out[SHAPE[1:]].to_numpy(float).T
    rows, columns, inner = shape
    values = rows * inner + inner * columns + rows * columns
    rate = 2 * VALUE * values / copied(values)  # a copy reads and writes
    tile = Tile(int(timings["tile_rows"].iloc[0]), int(timings["tile_columns"].iloc[0]))
    plain = tiled_flops(rows, columns, inner)
    out["peak"] = plain / peak + fixed_s
    out["roofline"] = roofline_s(plain, VALUE * values, peak, rate, fixed_s)
    for name, each in {"packing": ONE, "tiles": tile}.items():
        product_s = packed_s(tiled_flops(rows, columns, inner, each), packed(shape), packed_peak, fixed_s)
        out[name] = np.where(np.minimum(rows, columns) == 1, out["roofline"], product_s)
    return out


def errors(compared: pd.DataFrame) -> pd.DataFrame:
    """Mean and largest |predicted / measured - 1| in percent by kind and of all, for each of METHODS."""
    off = pd.DataFrame({name: 100 * (compared[name] / compared["measured_s"] - 1).abs() for name in METHODS})
    whole = pd.concat([off.assign(kind=compared["kind"]), off.assign(kind="all")])
    found = whole.groupby("kind", sort=False).agg(["mean", "max"])
    found.columns = ["_".join(pair) for pair in found.columns]
    return found.assign(shapes=whole.groupby("kind").size()).reset_index()


def summary(timings: pd.DataFrame) -> str:
    """`errors`, for the terminal. timings: as in `compare`"""
    return errors(compare(timings)).to_string(index=False, float_format="%.1f")
