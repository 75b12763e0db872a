"""Attention TFLOPS by sequence length: measured by `lowband bench-kernel`, and as arXiv 2307.08691 reports.

One row per device, method, direction, head size, mask and length. FLOPs as the paper counts them: 4 T^2 D per
head forward, 2.5 times that backward, half with causal masking. fwd+bwd: FLOPs of both over the time of both.
over_flash, over_cudnn: TFLOPS over those of torch's build of FlashAttention-2, and of cuDNN, in the same run
"""

import pandas as pd

CASE = ["device", "method", "head_dim", "is_causal", "seq_len"]
COLUMNS = ["provenance", *CASE, "direction", "tflops", "over_flash", "over_cudnn", "outcome"]
PEERS = {"over_flash": "torch flash", "over_cudnn": "torch cudnn"}
_NAMES = {"triton": "lowband flash2"}
_DIRECTIONS = {"forward": "fwd", "backward": "bwd"}


def build(measured: pd.DataFrame, reported: pd.DataFrame) -> pd.DataFrame:
    """measured: rows of results/reference/*/kernels.csv, if there are any; reported: the paper's."""
    df = pd.concat([_reported(reported), *_measured(measured)], ignore_index=True)
    point = ["device", "head_dim", "is_causal", "seq_len", "direction"]
    for name, method in PEERS.items():
        peer = df[df["method"] == method].set_index(point)["tflops"].rename("peers_tflops")
        df[name] = df["tflops"] / df.join(peer, on=point)["peers_tflops"]
    return df[COLUMNS]


def _reported(df: pd.DataFrame) -> pd.DataFrame:
    rows = df[(df["metric"] == "speed") & df["seqlen"].notna() & (df["unit"] == "TFLOPs/s")]
    seq_len = rows["seqlen"].str.replace("k", "", regex=False).astype(int)
    return pd.DataFrame(
        {
            "provenance": "reported",
            "device": rows["gpu"],
            "method": rows["method"],
            "head_dim": rows["head_dim"].astype(int),
            "is_causal": rows["causal"] == "yes",
            "seq_len": seq_len.where(~rows["seqlen"].str.endswith("k"), seq_len * 1024),
            "direction": rows["direction"],
            "tflops": pd.to_numeric(rows["value"], errors="coerce"),
            "outcome": rows["value"].map(lambda value: "oom" if value == "OOM" else "ok"),
        }
    )


def _measured(df: pd.DataFrame) -> list[pd.DataFrame]:
    """One table per direction; none if nothing was measured."""
    if df.empty:
        return []
    df = df[df["part"] == "attention"]  # other parts lack these sizes
    rows = df.assign(
        provenance="measured",
        method=df["implementation"].replace(_NAMES),
        is_causal=df["causal"].astype(bool),
        head_dim=df["head_dim"].astype(int),
        seq_len=df["seq_len"].astype(int),
        direction=df["operation"].map(_DIRECTIONS),
    )
    both = (
        rows.groupby(["provenance", *CASE], as_index=False)
        .agg(
            flops=("flops", "sum"), time_s=("time_s", lambda times: times.sum(skipna=False)),
            outcome=("outcome", "max"), worst=("outcome", lambda outcomes: (outcomes != "ok").any()),
        )
        .assign(direction="fwd+bwd")
    )  # fmt: skip
    both["outcome"] = both["outcome"].where(both["worst"], "ok")
    return [part.assign(tflops=part["flops"] / part["time_s"] / 1e12) for part in (rows, both)]
