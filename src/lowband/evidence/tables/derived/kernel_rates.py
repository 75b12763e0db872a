"""Memory-bound kernels on a GPU: softmax and block quantization, measured by `lowband bench-kernel`.

partners     messages that are summed; 1 where there are no messages
bytes_per_s  bytes that the algorithm moves, by its formula, over the median time; if the algorithm is unknown
             (torch's softmax), the least that any algorithm moves
of_copy      bytes_per_s over that of a copy on the same device in the same run: of the copy that moves most
             nearly as many bytes, where several were measured
over_torch   torch's time over this kernel's, on the same size in the same run: above 1 is faster than torch
"""

import numpy as np
import pandas as pd

SIZE = ["device", "part", "operation", "dtype", "rows", "columns", "partners"]
COLUMNS = [
    "provenance", *SIZE, "implementation", "time_s", "bytes_per_s", "of_copy", "over_torch", "outcome",
    "reason", "commit",
]  # fmt: skip
PARTS = ("softmax", "block_quant")
REFERENCE = "torch"


def build(measured: pd.DataFrame) -> pd.DataFrame:
    """measured: rows of results/reference/*/kernels.csv; if there are none, the table is empty."""
    if measured.empty:
        return pd.DataFrame(columns=COLUMNS)
    df = measured[measured["part"].isin(PARTS)].assign(provenance="measured")
    df = df.fillna({"partners": 1}).astype({"rows": int, "columns": int, "partners": int})
    df["bytes_per_s"] = df["bytes"].fillna(df["least_bytes"]) / df["time_s"]
    copies = measured[(measured["part"] == "ceilings") & (measured["operation"] == "copy")]
    df["of_copy"] = df["bytes_per_s"] / _rates_of_copies(df, copies)
    torchs = df[df["implementation"] == REFERENCE].groupby(SIZE)["time_s"].max()
    df = df.join(torchs.rename("torch_time_s"), on=SIZE)
    df["over_torch"] = df["torch_time_s"] / df["time_s"]
    return df[COLUMNS].sort_values([*SIZE, "implementation"], kind="stable", ignore_index=True)


def _rates_of_copies(df: pd.DataFrame, copies: pd.DataFrame) -> "pd.Series[float]":
    """For each row, bytes a second of the copy on its device that is nearest in bytes, as a ratio."""
    copies = copies[copies["time_s"].notna()]
    sized = pd.DataFrame(
        {
            "device": copies["device"], "log": np.log(copies["bytes"].astype(float)),
            "rate": copies["bytes"] / copies["time_s"],
        }
    ).sort_values("log")  # fmt: skip
    moved = df["bytes"].fillna(df["least_bytes"]).astype(float)
    wanted = pd.DataFrame({"device": df["device"], "log": np.log(moved)}).dropna()
    near = pd.merge_asof(
        wanted.sort_values("log").reset_index(), sized, on="log", by="device", direction="nearest"
    )
    return near.set_index("index")["rate"].reindex(df.index)
