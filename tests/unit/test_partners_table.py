"""The table `partners`: each run beside those of the same seed, and what it sent between replicas."""

import pandas as pd
import pytest

from lowband.evidence.tables.derived import partners
from lowband.evidence.tables.points import POINT
from lowband.spec.mesh import WORLD

STEPS = 60
LOSS = {"hsdp": 2.0, "averaged-adam": 2.5, "decentralised-adam": 2.6}


def tables() -> list[pd.DataFrame]:
    runs, steps, sent = [], [], []
    for scheme, loss in LOSS.items():
        for repeat in (1, 2):
            run = f"{scheme}-{repeat}"
            named = {
                **dict.fromkeys(POINT, "x"),
                "scheme": scheme,
                "suite": "decentralised",
                "repeat": repeat,
            }
            distance = 0.25 * repeat if scheme == "decentralised-adam" else None
            runs.append({"run_id": run, **named, "consensus_distance": distance})
            # The first ten are left out. The second seed is 0.1 higher, decentralised twice as much.
            more = (0.2 if distance else 0.1) * (repeat - 1)
            steps += [
                {"run_id": run, "step": n, "loss": 9.0 if n <= 10 else loss + more}
                for n in range(1, STEPS + 1)
            ]
            sent += [
                {"run_id": run, "level": level, "counted_bytes": count}
                for level, count in ((WORLD, 100), (WORLD, 20), ("node", 7))
            ]
    return [pd.DataFrame(rows) for rows in (runs, steps, sent)]


def test_each_run_is_beside_those_of_its_seed() -> None:
    table = partners.build(*tables()).set_index(["scheme", "repeat"])
    ours = table.loc["decentralised-adam"]
    assert ours["difference"].tolist() == pytest.approx([0.6, 0.7])
    assert ours["over_averaged"].tolist() == pytest.approx([0.1, 0.2])
    assert ours["consensus_distance"].tolist() == [0.25, 0.5]
    assert table.loc["hsdp", "difference"].tolist() == [0, 0]
    assert table["consensus_distance"].isna().sum() == 4
    assert set(table["sent_bytes"]) == {120}
    assert set(table["last_step"]) == {STEPS}
