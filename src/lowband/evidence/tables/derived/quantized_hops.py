"""A hop in quantized blocks: what its kernels take, as measured, beside what its messages take on a link.

The first hop of a reduce-scatter (arXiv 2306.10209): a rank encodes a message for each of its partners,
sends it, sums those that come and encodes the sum for the next hop. Kernels and wire are counted one after
the other. A row per device, wire, measured size of a message, and link of a machine file of that device.

message_values  of one of the messages, as many as there are ranks
kernels_s       measured: each message encoded alone, theirs summed and the sum encoded. The engine encodes
                them in one launch, which should take less where one alone does not fill the device
wire_s          predicted: the messages to the others at the link's stated rate, without its latency
over_wire       kernels_s / wire_s
gain            the same hop's time in 16 bits, without any kernel, over kernels_s + wire_s
commit          of the kernels' rows, several if they differ
"""

from collections.abc import Iterator
from typing import Any, get_args

import pandas as pd

from lowband.spec.config import Config
from lowband.spec.partition import ALIGN
from lowband.spec.wire import WIRE_BITS, Wire, message_bytes

COLUMNS = [
    "provenance", "device", "cluster", "level", "wire", "ranks", "message_values", "link_bytes_per_s",
    "kernels_s", "wire_s", "over_wire", "gain", "commit",
]  # fmt: skip


def build(measured: pd.DataFrame) -> pd.DataFrame:
    """measured: rows of results/reference/*/kernels.csv; if there are none, the table is empty."""
    rows = [] if measured.empty else [*_rows(measured, Config())]
    return pd.DataFrame(rows, columns=COLUMNS)


def _rows(measured: pd.DataFrame, config: Config) -> Iterator[dict[str, Any]]:
    of_blocks = measured["part"] == "block_quant"
    ours = measured[of_blocks & (measured["implementation"] == "triton") & (measured["outcome"] == "ok")]
    for (device, wire, values), (ranks, seconds, commit) in _kernels(ours).items():
        for cluster in config.clusters:
            machine = config.machine(cluster)
            if machine.box is not None or not machine.device.is_of(device):
                continue
            for level in machine.levels:
                if level.link is None:
                    continue
                rate = level.link.gigabytes_per_s * 1e9
                on_wire, wide = (
                    (ranks - 1) * message_bytes(values, each, "bf16", ALIGN) / rate for each in (wire, "bf16")
                )
                yield {
                    "provenance": "predicted", "device": device, "cluster": cluster, "level": level.name,
                    "wire": wire, "ranks": ranks, "message_values": values, "link_bytes_per_s": rate,
                    "kernels_s": seconds, "wire_s": on_wire, "over_wire": seconds / on_wire,
                    "gain": wide / (seconds + on_wire), "commit": commit,
                }  # fmt: skip


def _kernels(rows: pd.DataFrame) -> dict[tuple[str, Wire, int], tuple[int, float, str]]:
    """By device, wire and values of a message: ranks, seconds of the hop's kernels, the rows' commits."""
    found: dict[tuple[str, Wire, int], tuple[int, float, str]] = {}
    for (device, _), of_size in rows.groupby(["device", "columns"]):
        for wire in get_args(Wire):
            if wire not in WIRE_BITS:
                continue
            by_operation, names = of_size.set_index("operation"), [f"encode {wire}", f"sum_encode {wire}"]
            if not set(names) <= set(by_operation.index):
                continue
            encode, onward = by_operation.loc[names].to_dict("records")
            ranks = int(onward["partners"])
            seconds = ranks * encode["time_s"] + onward["time_s"]
            commits = " ".join(dict.fromkeys((encode["commit"], onward["commit"])))
            found[str(device), wire, int(onward["columns"])] = ranks, seconds, commits
    return found
