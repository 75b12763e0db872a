"""Training TFLOPS of a GPU: measured by `lowband bench-kernel`, and Table 1 of arXiv 2307.08691.

One row per device, model, sequence length and method. FLOPs as the paper counts them, with all weights and
attention not halved. Measured rows are for one device, the paper's for eight.
"""

import pandas as pd

COLUMNS = ["provenance", "device", "model", "seq_len", "method", "tflops", "outcome", "reason"]
NAMES = {"sdpa": "torch SDPA", "flash2": "lowband flash2"}
# The paper's models -> their names in config/models.yaml
MODELS = {"GPT3-1.3B": "gpt-1.3b", "GPT3-2.7B": "gpt-2.7b"}


def build(measured: pd.DataFrame, reported: pd.DataFrame) -> pd.DataFrame:
    """measured: rows of results/reference/*/kernels.csv, if there are any; reported: the paper's."""
    parts = [_reported(reported), *([] if measured.empty else [_measured(measured)])]
    df = pd.concat(parts, ignore_index=True)[COLUMNS]
    return df.sort_values(["model", "seq_len", "provenance", "device"], kind="stable", ignore_index=True)


def _reported(df: pd.DataFrame) -> pd.DataFrame:
    rows = df[(df["artifact"] == "Table 1") & (df["metric"] == "training speed")]
    return pd.DataFrame(
        {
            "provenance": "reported",
            "device": rows["gpu"],
            "model": rows["model"].map(MODELS),
            "seq_len": rows["context"].str.removesuffix("k").astype(int) * 1024,
            "method": rows["method"],
            "tflops": pd.to_numeric(rows["value"]),
            "outcome": "ok",
            "reason": "",
        }
    )


def _measured(df: pd.DataFrame) -> pd.DataFrame:
    rows = df[df["part"] == "training"]
    return rows.assign(
        provenance="measured",
        method=rows["implementation"].replace(NAMES),
        seq_len=rows["seq_len"].astype(int),
        tflops=rows["paper_flops"] / rows["time_s"] / 1e12,
        reason=rows["reason"].fillna(""),
    )
