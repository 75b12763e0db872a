"""Specs, closed forms, predictions, the report and `lowband doctor` work where torch is not installed."""

import subprocess
import sys

CODE = """
import importlib, pkgutil
from importlib.machinery import PathFinder

find = PathFinder.find_spec
PathFinder.find_spec = lambda name, *rest: None if name.split(".")[0] == "torch" else find(name, *rest)
for name in ("errors", "spec", "cost", "predict", "evidence"):
    module = importlib.import_module(f"lowband.{name}")
    for inner in pkgutil.walk_packages(getattr(module, "__path__", []), f"{module.__name__}."):
        importlib.import_module(inner.name)
        print(inner.name)
from lowband.__main__ import main
main(["doctor"])
"""


def test_no_torch_is_needed() -> None:
    result = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert "lowband.evidence.report.figures.scaling" in result.stdout
    assert "no training here; predictions, tables and figures work" in result.stdout
