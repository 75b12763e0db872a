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
SHIPPED = ROOT / "results" / "reference" / "kernels"
DEVICES_TRITON = "3.6.0"  # of the machines whose rows are shipped
TARGETS = ("sm_80", "sm_90", "gfx90a", "gfx942")
# One variant of each kernel, of attention those with heads of 64, for each target; as JSON lines.
ONE_OF_EACH = """
import json, sys
from lowband.kernels.compile import compile_variant, variants
for target in sys.argv[1:]:
    chosen = {}
    for variant in variants(target):
        mask = variant.constants.get("MASK"), variant.constants.get("IS_CAPPED")
        if (variant.kernel, mask) not in chosen or variant.config.startswith("head 64"):
            chosen[variant.kernel, mask] = variant
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
# Every tile for heads of 64 and 128 of the kernels that loop over keys, on sm_90.
TILES = """
import json
from lowband.kernels.compile import compile_variant, variants
from lowband.kernels.flash_attention_configs import BACKWARD_QUERIES, FORWARD
of = {"flash_attention.forward": FORWARD, "flash_attention.backward_queries": BACKWARD_QUERIES}
for variant in variants("sm_90"):
    if variant.kernel in of and variant.constants["HEAD"] in (64, 128):
        for rows, columns, warps, stages in of[variant.kernel]["cuda"][variant.constants["HEAD"]]:
            tile = variant._replace(
                constants={**variant.constants, "ROWS": rows, "COLUMNS": columns},
                options={"num_warps": warps, "num_stages": stages},
            )
            print(json.dumps(compile_variant(tile, "sm_90")._asdict()))
"""
# The forward without a causal mask, all of it pipelined: the smallest change after which products wait.
PIPELINED = """
import importlib.util, sys
from pathlib import Path
from lowband.kernels import flash_attention_forward as sound
from lowband.kernels.compile import compile_variant, variants
text, stages = Path(sound.__file__).read_text(), '1 if IS_MASKED and MASK == "full" else None'
assert text.count(stages) == 1
Path(sys.argv[1]).write_text(text.replace(stages, "None"))
spec = importlib.util.spec_from_file_location("pipelined", sys.argv[1])
spec.loader.exec_module(pipelined := importlib.util.module_from_spec(spec))
[variant] = [
    v for v in variants("sm_90")
    if v.kernel == "flash_attention.forward" and v.config.startswith("head 64 full")
]
print(compile_variant(variant._replace(function=pipelined.flash_forward), "sm_90").serialized)
"""
# Launches of attention for some lengths where tiles are compiled for an H100 and neither timed nor run.
LENGTHS = """
import json, torch
from types import SimpleNamespace
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from lowband.kernels import flash_attention_triton as fast
driver.set_active(SimpleNamespace(
    get_current_target=lambda: GPUTarget("cuda", 90, 32),
    get_current_device=lambda: 0, get_current_stream=lambda _: 0,
))
kernels, timed = (fast.flash_forward, fast.flash_backward_keys, fast.flash_backward_queries), []
for function in (*(kernel.fn for kernel in kernels), fast.flash_delta):
    function.run = lambda *a, run=function.run, **k: run(*a, **{**k, "warmup": True})
for kernel in kernels:
    kernel._do_bench = lambda *_, **__: timed.append(1) or [0.0]
for queries, keys in ((4096, 4096), (3008, 2064), (512, 512), (304, 272), (304, 4096), (8, 8), (24, 24)):
    q, k = (torch.empty(1, 1, length, 32, dtype=torch.bfloat16) for length in (queries, keys))
    rows = torch.empty(1, 1, queries)
    fast.launch_forward(q, k, k, q, rows, True, 0.1)
    fast.launch_backward(q, q, k, k, q, rows, None, q, k, k, True, 0.1)
    compiled = [len(kernel.fn.device_caches[0][0]) for kernel in kernels]
    print(json.dumps([queries, keys, [len(kernel.cache) for kernel in kernels], len(timed), compiled]))
"""


def python(code: str, *arguments: str, packages: Path | None = None) -> str:
    """What it prints. packages: a folder of packages that come before those installed"""
    cache = ROOT / "build" / "triton-cache"  # what has not changed is not compiled again
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        capture_output=True,
        text=True,
        timeout=900,
        env={
            **os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(cache),
            "PYTHONPATH": os.pathsep.join([*([str(packages)] if packages else []), str(ROOT / "src")]),
        },
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


@pytest.fixture(scope="module")
def compiled() -> list[dict[str, Any]]:
    """All targets in one process: to import torch and Triton takes as long as to compile for one."""
    return [json.loads(line) for line in python(ONE_OF_EACH, *TARGETS).splitlines()]


@pytest.mark.parametrize("target", TARGETS)
def test_each_kernel_compiles_and_fits(target: str, compiled: list[dict[str, Any]]) -> None:
    rows = [row for row in compiled if row["target"] == target]
    assert len(rows) == len({(row["kernel"], row["config"]) for row in rows}) >= 15
    for row in rows:
        assert 0 < row["registers"] <= 512, row  # AMD counts the matrix units' registers too
        assert row["shared_bytes"] <= row["shared_limit_bytes"], row
        if row["kernel"].startswith("flash"):
            assert (row["matrix_instructions"] > 0) == ("delta" not in row["kernel"]), row
        assert row["spilled_bytes"] <= 64, row
        assert row["serialized"] == 0, row


def test_products_that_wait_are_noticed(tmp_path: Path) -> None:
    assert int(python(PIPELINED, str(tmp_path / "pipelined.py"))) > 0


@pytest.mark.wide
@pytest.mark.parametrize("version", ["pinned", DEVICES_TRITON])
def test_no_tile_makes_products_wait(version: str) -> None:
    rows = [json.loads(line) for line in python(TILES, packages=packages_of(version)).splitlines()]
    assert len(rows) == 46  # 13 tiles with each mask, and those of heads of 128 with spans and capped
    assert {row["triton"] == DEVICES_TRITON for row in rows} == {version == DEVICES_TRITON}
    assert [row for row in rows if row["serialized"]] == []


def packages_of(version: str) -> Path | None:
    """A folder with this Triton, installed when it is first asked for; None for the pinned one."""
    if version == "pinned":
        return None
    folder = ROOT / "build" / f"triton-{version}"
    if not folder.exists():
        making = folder.with_name(f"{folder.name}.new")
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(making)]
        done = subprocess.run([*pip, f"triton=={version}"], capture_output=True, text=True, timeout=900)
        if done.returncode:
            pytest.skip(f"triton {version} cannot be installed: {done.stderr.strip().splitlines()[-1]}")
        making.rename(folder)
    return folder


def test_sizes_of_one_compile() -> None:
    assert len(python(ONES).split()) >= 14


@pytest.mark.parametrize("version", ["pinned", pytest.param(DEVICES_TRITON, marks=pytest.mark.wide)])
def test_tiles_are_chosen_by_class_of_length_and_the_code_is_one(version: str) -> None:
    """A class is timed once: the tiles of heads of 32 are 2, 2 and 1. Odd lengths are compiled apart."""
    found = [json.loads(line) for line in python(LENGTHS, packages=packages_of(version)).splitlines()]
    assert found == [
        [4096, 4096, [1, 1, 1], 5, [1, 1, 1]],
        [3008, 2064, [1, 1, 1], 5, [1, 1, 1]],  # as 4096 and 4096
        [512, 512, [2, 2, 2], 10, [1, 1, 1]],
        [304, 272, [2, 2, 2], 10, [1, 1, 1]],  # as 512 and 512
        [304, 4096, [3, 3, 3], 15, [1, 1, 1]],
        [8, 8, [4, 4, 4], 20, [2, 2, 2]],
        [24, 24, [5, 5, 5], 25, [2, 2, 2]],
    ]


def test_the_shipped_table_is_what_compiles(compiled: list[dict[str, Any]]) -> None:
    """`lowband bench-kernel --compile --out results/reference/kernels` writes it."""
    rows = pd.read_csv(SHIPPED / "compiled.csv", dtype=str, keep_default_na=False)
    assert sorted(rows[["kernel", "config", "target"]].to_numpy().tolist()) == sorted(json.loads(python(ALL)))
    shipped = rows.to_dict("records")
    assert [row for row in compiled if {name: str(value) for name, value in row.items()} not in shipped] == []


def test_no_shipped_row_has_products_that_wait() -> None:
    """By the pinned Triton, and by the one on the devices that were measured."""
    versions = []
    for folder in (SHIPPED, SHIPPED / f"triton-{DEVICES_TRITON}"):
        rows = pd.read_csv(folder / "compiled.csv", dtype={"triton": str})
        versions.append(set(rows["triton"]))
        asynchronous = rows[(rows["target"] == "sm_90") & (rows["matrix_instructions"] > 0)]
        assert set(asynchronous["config"].str.split().str[2]) == {"causal", "full", "spans"}
        assert set(rows["serialized"]) == {0}
    assert versions[1] == {DEVICES_TRITON} != versions[0]
