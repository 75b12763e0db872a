"""The campaign on few rounds: a worker leaves, one is killed, one joins; the rest have the same weights."""

from pathlib import Path

import pytest

from lowband.spec.csv_tables import read_table
from tests import warm

LONGEST_S = 600


@pytest.mark.parametrize(("rounds", "steps"), [(40, 20), pytest.param(240, 100, marks=pytest.mark.wide)])
def test_workers_come_and_go_and_the_loss_falls(tmp_path: Path, rounds: int, steps: int) -> None:
    command = f"-m tests.one_byte --seeds 1 --rounds {rounds} --steps {steps} --out".split()
    campaign = warm.begun([*command, tmp_path], tmp_path / "output")
    campaign.join(LONGEST_S)
    assert warm.killed(campaign) == 0, (tmp_path / "output").read_text()
    rows = read_table(tmp_path / "rounds.csv").set_index("method")
    ours, theirs = rows.loc["one byte"], rows.loc["data parallel"]
    assert ours["round"].iloc[-1] == theirs["round"].iloc[-1] == rounds
    assert ours["same_weights"].iloc[-1] == True  # noqa: E712 (numpy's)
    assert ours["sent_bytes"].iloc[-1] == rounds
    assert {2, 3, 4} <= set(ours["workers"].dropna())
    assert ours["loss"].iloc[0] == pytest.approx(theirs["loss"].iloc[0], abs=1e-6)
    for losses in (ours["loss"], theirs["loss"]):
        assert losses.iloc[-1] < losses.iloc[0]
