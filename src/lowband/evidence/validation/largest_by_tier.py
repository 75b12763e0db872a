"""The largest model on a node and how slow it is, by where its states lie: ZeRO-3, one sequence a device.

GPTs of the shape of the 20B model (predict/search/largest.py), with DeepSpeed's stack and full recomputation.
"""

import pandas as pd

from lowband.predict.request import setting
from lowband.predict.search.largest import largest
from lowband.predict.show.largest import record
from lowband.predict.workload import Workload
from lowband.spec.config import Config

NODES = (("dgx2", 1), ("dgx2", 16), ("polaris", 4), ("frontier", 8), ("dgx-h100", 8))  # cluster, devices
SEQ_LEN = 1024


def largest_by_tier(config: Config) -> pd.DataFrame:
    """A row per node and place of states. times: of the largest with all states on devices"""
    rows = []
    for cluster, ranks in NODES:
        machine, stack = setting(config, cluster, "deepspeed-zero")
        scheme, model = config.scheme("zero3").on(list(machine.sizes)), config.model("gpt-20b")
        found = [record(one) for one in largest(Workload(machine, stack, model, scheme, ranks, 1, SEQ_LEN))]
        for row in found:
            times = row["parameters"] / found[0]["parameters"]
            rows.append({**row, "cluster": cluster, "ranks": ranks, "times": times})
    return pd.DataFrame(rows)
