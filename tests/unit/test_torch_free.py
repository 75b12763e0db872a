"""Specs, closed forms, predictions, the report, the workflow and `lowband doctor` work in the environment of
`make figures`: it has the extras `report` and `workflow`, and no torch."""

import os
import re
import subprocess
from pathlib import Path

from tests import environments

CODE = """
import importlib, pkgutil, sys

for name in ("errors", "spec", "cost", "predict", "evidence", "box"):
    module = importlib.import_module(f"lowband.{name}")
    for inner in pkgutil.walk_packages(getattr(module, "__path__", []), f"{module.__name__}."):
        importlib.import_module(inner.name)
        print(inner.name)
for name in sys.argv[1:]:
    importlib.import_module(name)
from lowband.__main__ import main
main(["doctor"])
"""


def test_no_torch_is_needed(tmp_path: Path) -> None:
    rules = environments.ROOT / "workflow" / "rules" / "common.smk"
    modules = re.findall(r"^from (lowband[.\w]*) import", rules.read_text(encoding="utf-8"), re.MULTILINE)
    assert len(modules) > 10
    python = environments.made(tmp_path / "venv", *environments.REPORT)
    env = {**os.environ, "PYTHONPATH": str(environments.ROOT / "src")}
    result = subprocess.run([python, "-c", CODE, *modules], capture_output=True, text=True, env=env)
    assert result.returncode == 0, result.stderr
    assert "lowband.evidence.report.figures.scaling" in result.stdout
    assert "no training here; predictions, tables and figures work" in result.stdout
