"""A new collective is one row of spec/step.py: everything that counts, sends or times collectives has it."""

import json
import sys
from pathlib import Path

from tests.called import called


def test_one_more_collective_is_one_row() -> None:
    done = called(sys.executable, Path(__file__).with_name("added_collective.py"))
    assert done.returncode == 0, done.stderr
    seen = json.loads(done.stdout)
    assert seen["ledger"] == seen["closed form"]
    sent = {collective: size for _, collective, wire, size in seen["ledger"] if wire == "int8"}
    assert sent.keys() == {"again_reduce"}
    assert sent["again_reduce"] > 0
    assert seen["seconds"] > 0
    assert seen["buffers"][0] < seen["buffers"][1]
    assert seen["has item"]
    assert seen["plan"] == ["native", "int8"]
