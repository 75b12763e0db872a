"""Every kernel compiles, without a GPU, for the machines of the papers, and fits them."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

ROOT = Path(__file__).parents[2]
SHIPPED = ROOT / "results" / "reference" / "kernels" / "compiled.csv"
TARGETS = ("sm_80", "sm_90", "gfx90a", "gfx942")
# One variant of each kernel, of attention that with heads of 64, for each target; as JSON lines.
ONE_OF_EACH = """
import json, sys
from lowband.kernels.compile import compile_variant, variants
for target in sys.argv[1:]:
    chosen = {}
    for variant in variants(target):
        if variant.kernel not in chosen or variant.config.startswith("head 64"):
            chosen[variant.kernel] = variant
    for variant in chosen.values():
        print(json.dumps(compile_variant(variant, target)._asdict()))
"""
# Triton makes every number that is 1 a constant: one row, one head, one query.
ONES = """
from lowband.kernels.compile import compile_variant, variants
ones = {"rows": 1, "columns": 1, "partners": 1, "heads": 1, "group": 1, "queries": 1, "keys": 1}
for variant in variants("sm_90"):
    if variant.kernel.startswith("flash") and "head 32" not in variant.config:
        continue
    function = variant.function.fn if hasattr(variant.function, "configs") else variant.function
    here = {name: one for name, one in ones.items() if name in function.arg_names}
    print(compile_variant(variant._replace(constants={**variant.constants, **here}), "sm_90").kernel)
"""
ALL = """
import json, sys
from lowband.kernels.compile import TARGETS, variants
print(json.dumps([[v.kernel, v.config, target] for target in TARGETS for v in variants(target)]))
"""


def python(code: str, *arguments: str) -> str:
    cache = ROOT / "build" / "triton-cache"  # what has not changed is not compiled again
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        capture_output=True,
        text=True,
        timeout=900,
        env={**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(cache)},
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


@pytest.fixture(scope="module")
def compiled() -> list[dict[str, Any]]:
    """All targets in one process: to import torch and Triton takes as long as to compile for one."""
    return [json.loads(line) for line in python(ONE_OF_EACH, *TARGETS).splitlines()]


@pytest.mark.parametrize("target", TARGETS)
def test_each_kernel_compiles_and_fits(target: str, compiled: list[dict[str, Any]]) -> None:
    rows = [row for row in compiled if row["target"] == target]
    assert len(rows) == len({row["kernel"] for row in rows}) >= 12
    for row in rows:
        assert 0 < row["registers"] <= 512, row  # AMD counts the matrix units' registers too
        assert row["shared_bytes"] <= row["shared_limit_bytes"], row
        if row["kernel"].startswith("flash"):
            assert (row["matrix_instructions"] > 0) == ("delta" not in row["kernel"]), row
        assert row["spilled_bytes"] <= 64, row


def test_sizes_of_one_compile() -> None:
    assert len(python(ONES).split()) >= 14


def test_the_shipped_table_has_every_variant() -> None:
    """`lowband bench-kernel --compile --out results/reference/kernels` writes it."""
    rows = pd.read_csv(SHIPPED, dtype=str, keep_default_na=False)
    assert sorted(rows[["kernel", "config", "target"]].to_numpy().tolist()) == sorted(json.loads(python(ALL)))
