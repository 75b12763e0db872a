"""The command that measures `make smoke`, on two processes of known work."""

import importlib.util
import sys
from pathlib import Path

from tests.checkout import ROOT

SCRIPT = ROOT / "workflow" / "scripts" / "smoke_cost.py"
SPEC = importlib.util.spec_from_file_location("smoke_cost", SCRIPT)
assert SPEC is not None
assert SPEC.loader is not None
smoke_cost = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(smoke_cost)


def test_each_process_is_counted_under_its_step(tmp_path: Path) -> None:
    work = tmp_path / "work.py"
    work.write_text("import time\nwhile time.process_time() < 0.3: pass\n")
    parent = tmp_path / "parent.py"
    parent.write_text(f"import subprocess, sys\nsubprocess.run([sys.executable, {str(work)!r}])\n" * 2)
    rows = {step: (count, seconds) for step, count, seconds in smoke_cost.cost([sys.executable, str(parent)])}
    counts = {step: count for step, (count, _) in rows.items()}
    assert counts == {"work.py": 2, "parent.py": 1, smoke_cost.ALL: None}
    assert rows["work.py"][1] >= 0.6
    assert rows["parent.py"][1] >= rows["work.py"][1]  # its children once more
    assert rows[smoke_cost.ALL][1] >= rows["work.py"][1]


def test_a_verb_of_lowband_is_a_step() -> None:
    [(step, count, _), _] = smoke_cost.cost([sys.executable, "-m", "lowband", "collect", "--help"])
    assert (step, count) == ("collect", 1)
