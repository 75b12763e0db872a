"""Published times and bubbles of pipelines, predicted by cost/timeline.py from the schedules' lists alone.

Zero bubble (arXiv 2401.10241), Table 5: bubble rates that its authors compute from profiled times, which they
do not print. A rate is the idle share of a rank from its first action to its last. Here forward and input
part take equally long and all stages are alike; two numbers per model, weight / forward and send / forward,
are fitted on its 1F1B and ZB-H1 rows. ZB-1p's rates are printed equal to ZB-H1's, so they are no further
evidence. ZB-2p's lists are found by a search and not printed: no prediction. Table 7: measured throughputs of
ZB-V and 1F1B, in equal memory, on more ranks of the same models; their ratio, by the same two numbers.

Perseus (arXiv 2312.06902): shortest iterations of 1F1B over 8 stages, from the least time of each stage's
forward and backward; without a fit, and without sends, which its authors do not list.

Megatron-LM (arXiv 2104.04473): the gain of interleaving is printed without a setting. Here 175B on 96 GPUs,
the model of its figure 12 (tensor 8, so 12 ranks along the pipeline), two chunks, no sends.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd

from lowband.cost.numbers import Num
from lowband.cost.timeline import timeline
from lowband.evidence.validation import reported
from lowband.spec.config import Config
from lowband.spec.schedules import Name, lists

BUBBLES, PERSEUS = "10_pipeline_bubbles.csv", "16_perseus.csv"
NAMES: dict[str, Name] = {
    "1F1B": "1f1b", "1F1B-I": "interleaved", "ZB-H1": "zb-h1", "ZB-H2": "zb-h2", "ZB-1p": "zb-h1",
}  # fmt: skip
FITTED = ("1F1B", "ZB-H1")
WEIGHT, SEND = np.linspace(0.3, 1.2, 46)[:, None], np.linspace(0, 0.2, 41)  # of the forward; the fit's grid
Fitted = tuple[int, float, float]  # ranks along the pipeline, weight / forward, send / forward
MEGATRON_RANKS, MEGATRON_CHUNKS, MEGATRON_ROUNDS = 12, 2, (1, 2, 4, 8)


def pipelines(config: Config) -> pd.DataFrame:
    """One row per published number and prediction of it; off: in points, or in % of what was published."""
    bubbles = reported(config, BUBBLES)
    rates, measured = (
        bubbles[(bubbles["arxiv"] == "2401.10241") & (bubbles["artifact"] == table)]
        for table in ("Table 5", "Table 7")
    )
    fitted = {
        str(model): (int(of_it["ranks"].iloc[0]), *_fit(of_it[of_it["system"].isin(FITTED)]))
        for model, of_it in rates.groupby("model", sort=False)
    }
    rows = _zero_bubble(rates, fitted) + _zb_v(measured, fitted)
    rows += _perseus(reported(config, PERSEUS))
    rows += _megatron(bubbles[bubbles["artifact"] == "abstract"].iloc[0])
    return pd.DataFrame(rows)


def _zero_bubble(rates: Any, fitted: Mapping[str, Fitted]) -> list[dict[str, object]]:
    rows = []
    for model, (_, weight, send) in fitted.items():
        of_model = rates[(rates["model"] == model) & rates["system"].isin(list(NAMES))]
        for row in of_model.itertuples():
            percent, predicted = 100 * float(row.value), 100 * float(_bubble(row, weight, send))
            use = "calibration" if row.system in FITTED else "held out"
            constants = {"weight_over_forward": weight, "send_over_forward": send}
            rows.append(_row(row, use, "bubble rate, %", percent, predicted, predicted - percent) | constants)
    return rows


def _zb_v(measured: Any, fitted: Mapping[str, Fitted]) -> list[dict[str, object]]:
    """Throughput of ZB-V over 1F1B's in the same memory, in steps of the same micro-batches."""
    rows = []
    keys = ["model", "note"]  # the note has the batch
    plain = measured[measured["system"] == "1F1B"].set_index(keys)["value"]
    for row in measured[measured["system"] == "ZB-V"].itertuples():
        ranks, weight, send = fitted[row.model]
        p, many = int(row.ranks), int(row.micro_batches)
        send *= p / ranks  # a stage of fewer layers computes for less time
        whole = timeline(lists("1f1b", p, many, 1), 1.0, 1.0, weight, send).step_s
        in_a_vee = timeline(lists("zb-v", p, many, 2), 0.5, 0.5, weight / 2, send).step_s
        published = 100 * (float(row.value) / float(plain[row.model, row.note]) - 1)
        gain = 100 * (float(whole / in_a_vee) - 1)
        constants = {"weight_over_forward": weight, "send_over_forward": send}
        rows.append(
            _row(row, "held out", "throughput gain over 1F1B, %", published, gain, gain - published)
            | constants
        )
    return rows


def _fit(rows: Any) -> tuple[float, float]:
    """weight / forward and send / forward of least squares."""
    squares = sum((_bubble(row, WEIGHT, SEND) - float(row.value)) ** 2 for row in rows.itertuples())
    weight, send = np.unravel_index(np.argmin(squares), np.shape(squares))
    return float(WEIGHT[weight, 0]), float(SEND[send])


def _bubble(row: Any, weight: Num, send: Num) -> Num:
    """Idle share of the rank that is busy longest; times in forwards of a rank."""
    ranks, micro_batches, chunks = int(row.ranks), int(row.micro_batches), int(row.chunks)
    found = lists(NAMES[row.system], ranks, micro_batches, chunks)
    span = timeline(found, 1 / chunks, 1 / chunks, weight / chunks, send).span_s
    return 1 - micro_batches * (2 + weight) / span


def _perseus(printed: Any) -> list[dict[str, object]]:
    rows = []
    for _, of_setting in printed.groupby(["hardware", "model"], sort=False):
        stages = of_setting[of_setting["stage"] != ""].astype({"stage": int, "value": float})
        of_stage = stages.pivot_table(index="stage", columns="metric", values="value")
        seconds = {name.partition(",")[0]: list(of_stage[name]) for name in of_stage}
        for row in of_setting[of_setting["stage"] == ""].itertuples():
            found = lists("1f1b", int(row.ranks), int(row.micro_batches), 1)
            step_s = float(timeline(found, seconds["forward"], seconds["backward"], 0.0).step_s)
            published = float(row.value)
            off = 100 * (step_s / published - 1)
            rows.append(_row(row, "held out", "shortest iteration, s", published, step_s, off))
    return rows


def _megatron(row: Any) -> list[dict[str, object]]:
    """With 1 to 8 rounds of micro-batches: the printed gain is a least one, for none in particular."""
    rows = []
    for rounds in MEGATRON_ROUNDS:
        many = rounds * MEGATRON_RANKS
        plain = timeline(lists("1f1b", MEGATRON_RANKS, many, 1), 1.0, 1.0, 1.0)
        part = 1 / MEGATRON_CHUNKS
        interleaved = timeline(lists("interleaved", MEGATRON_RANKS, many, MEGATRON_CHUNKS), part, part, part)
        gain = 100 * (float(plain.step_s / interleaved.step_s) - 1)
        published = float(row.value.rstrip("+"))
        rows.append(
            _row(row, "held out", "least throughput gain, %", published, gain, gain - published)
            | {"model": "175B", "ranks": MEGATRON_RANKS, "micro_batches": many}
        )
    return rows


def _row(
    row: Any, use: str, quantity: str, published: float, predicted: float, off: float
) -> dict[str, object]:
    return {
        "provenance": "predicted",
        "arxiv": row.arxiv,
        "table": row.artifact,
        "system": getattr(row, "system", "1F1B"),
        "model": f"{row.model}, {row.hardware}" if hasattr(row, "hardware") else row.model,
        "ranks": row.ranks,
        "micro_batches": row.micro_batches,
        "use": use,
        "quantity": quantity,
        "published": published,
        "predicted": predicted,
        "off": off,
    }
