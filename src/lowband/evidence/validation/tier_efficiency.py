"""Which state may live where: what each tier's rate leaves of a device's speed, state by state.

ZeRO-Infinity's form (cost/tiers.py) for the tiers that machine files state. Weights and the optimizer's
states are sharded over all ranks: each fetches its part, and gathers the others' over the links, so a rank
gets weights at what tiers give to all ranks, and at no more than its slowest link; what it updates it has
from its own part of the tier. Rates and peak as the files state them, with what products reach of the peak.
"""

import pandas as pd

from lowband.cost.numbers import GIGA
from lowband.cost.tiers import STATES, Rates, State, efficiency, intensity
from lowband.predict.defaults import with_defaults
from lowband.spec.config import Config
from lowband.spec.machine import Machine, TierName
from lowband.spec.mesh import WORLD

MACHINES = ("dgx2", "polaris", "frontier", "dgx-h100")
NODES = (1, 32)
SEQ_LEN, HIDDEN = 1024, 8192  # ZeRO-Infinity's sequences; a width of its examples
SEQUENCES = (1, 2, 4, 8, 16, 32)
MAY = 0.9  # a state may live where nine tenths of the speed are left


def tier_efficiency(config: Config) -> pd.DataFrame:
    """A row for each machine, tier, state, number of nodes and batch. efficiency: a share, 0 to 1"""
    rows = []
    for name in MACHINES:
        stack = config.given_stack("ours", config.machine(name))
        machine, _ = with_defaults(config.machine(name), stack)
        reached = machine.device.matmul_efficiency
        peak = 1e12 * machine.device.peak_tflops["bf16"] * (1.0 if reached is None else reached.value)
        for tier in machine.tiers:
            for nodes in NODES:
                for state in STATES:
                    rate = arrives(machine, tier, state, nodes)
                    for sequences in SEQUENCES:
                        worth = intensity(state, sequences * SEQ_LEN, HIDDEN)
                        share = float(efficiency(worth, rate * GIGA, peak))
                        rows.append(
                            {
                                "provenance": "predicted", "cluster": name, "tier": tier, "state": state,
                                "nodes": nodes, "ranks": nodes * machine.node_size, "sequences": sequences,
                                "tokens": sequences * SEQ_LEN, "flops_per_byte": float(worth),
                                "gigabytes_per_s": rate, "efficiency": share, "may_live": share >= MAY,
                            }
                        )  # fmt: skip
    return pd.DataFrame(rows)


def arrives(machine: Machine, tier: TierName, state: State, nodes: int) -> float:
    """10^9 bytes a second of a state that a rank sees, of the whole model's where it is sharded."""
    ranks = machine.node_size
    own = Rates.of(machine.tier(tier), ranks)
    rate = float(min(own.fetch, own.stash))
    if tier == "disk":  # on its way through the host
        host = Rates.of(machine.tier("host"), ranks)
        rate = min(rate, float(min(host.fetch, host.stash)))
    if state == "activations":
        return rate
    of_all = nodes * ranks * rate
    if state == "optimizer":
        return of_all
    crossed = WORLD if nodes > 1 else machine.levels[-2].name
    return min(of_all, machine.link(crossed).gigabytes_per_s)
