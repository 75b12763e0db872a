"""The campaign on few rounds: a worker leaves, one is killed, one joins; the rest have the same weights."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from lowband.spec.csv_tables import read_table
from tests.one_byte.__main__ import ROOT


@pytest.mark.slow
def test_workers_come_and_go_and_the_loss_falls(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.one_byte", "--seeds", "1", "--rounds", "240", "--steps", "100"]
    env = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'src'}"}
    done = subprocess.run(
        [*command, "--out", str(tmp_path)], cwd=ROOT, env=env, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr
    rows = read_table(tmp_path / "rounds.csv").set_index("method")
    ours, theirs = rows.loc["one byte"], rows.loc["data parallel"]
    assert ours["round"].iloc[-1] == theirs["round"].iloc[-1] == 240
    assert ours["same_weights"].iloc[-1] == True  # noqa: E712 (numpy's)
    assert ours["sent_bytes"].iloc[-1] == 240
    assert {2, 3, 4} <= set(ours["workers"].dropna())
    assert ours["loss"].iloc[0] == pytest.approx(theirs["loss"].iloc[0], abs=1e-6)
    for losses in (ours["loss"], theirs["loss"]):
        assert losses.iloc[-1] < losses.iloc[0]
