"""Step times in the scale model whose nodes meet over a wide-area link, predicted for every rate.

Nothing is fitted: the box's rates alone decide (validation/scale_model.py). Runs are those of the suites
`wan-*`.
"""

import pandas as pd

from lowband.evidence.validation.scale_model import box_step
from lowband.predict.time import COMPUTED
from lowband.spec.config import Config
from lowband.spec.mesh import WORLD
from lowband.spec.run import RunSpec

SUITES = ("wan-step", "wan-48", "wan-200")
RATES = (1e11, 1e10, 1e9, 1e8, 1e7)  # bits per second of a node's link, at scale


def wan_steps(config: Config) -> pd.DataFrame:
    """One row per scheme and rate of the outer link.

    outer_link_bits_per_s   of a node, at the machine's scale
    outer_link_bytes_per_s  of a rank, in the box, as in runs.csv
    step_time_s             in the box, in the mean over a period
    compute_time_s          of it, matrix products at the paced rate
    """
    one_of_each = {spec.scheme.name: spec for spec in config.runs(SUITES)}
    return pd.DataFrame([_row(spec, rate) for spec in one_of_each.values() for rate in RATES])


def _row(spec: RunSpec, rate: float) -> dict[str, object]:
    machine = spec.machine
    assert machine.box is not None
    nominal = machine.link(WORLD).gigabytes_per_s  # of a rank
    linked = machine.with_outer_link(rate / (8e9 * nominal * machine.node_size))
    step = box_step(spec.model_copy(update={"machine": linked}))
    return {
        "provenance": "predicted",
        "cluster": machine.name,
        "model": spec.model.name,
        "scheme": spec.scheme.name,
        "outer_link_bits_per_s": rate,
        "outer_link_bytes_per_s": linked.link(WORLD).gigabytes_per_s * 1e9 / machine.box.scale,
        "step_time_s": float(step.total) * machine.box.scale,
        "compute_time_s": float(sum(step.items[name] for name in COMPUTED)) * machine.box.scale,
    }
