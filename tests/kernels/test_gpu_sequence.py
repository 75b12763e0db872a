"""The sequence of commands that docs/kernels.md gives for a GPU, read from there, on a CPU.

Kernels run under Triton's interpreter, on the small sizes of `--device cpu`; tests of a GPU are collected and
skipped. So every command is one that exists, tests are selected, and a further call makes what is missing.
"""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest
import torch
from inner import CASES

from lowband.bench.kernels.measure import RUNS
from lowband.evidence.tables.build import write_table
from lowband.spec.csv_tables import read_table

ROOT = Path(__file__).parents[2]
BLOCK = re.compile(r"```\n(export PYTHONPATH=.*?)```", re.DOTALL)
COMMIT = "0012345"
PARTS = {
    "ceilings", "products", "block_quant", "softmax", "attention", "attention_kinds", "training", "experts",
}  # fmt: skip


def documented() -> list[str]:
    [block] = BLOCK.findall((ROOT / "docs" / "kernels.md").read_text(encoding="utf-8"))
    return [line.partition(" #")[0].strip() for line in block.splitlines()]


def copied(to: Path) -> Path:
    """The tree as it is brought to a GPU machine: no git repository, nothing installed."""
    for name in (
        "src",
        "tests",
        "config",
        "results/reported",
    ):  # and no shipped rows: of such a device there are none
        shutil.copytree(ROOT / name, to / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", to)
    return to


def run(commands: list[str], tree: Path) -> subprocess.CompletedProcess[str]:
    script = "\n".join(commands)
    script = script.replace("<the commit it was copied from>", COMMIT)
    return subprocess.run(
        ["bash", "-exc", script], cwd=tree, capture_output=True, text=True, timeout=2700,
        env={
            **os.environ, "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
            "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "",
        },
    )  # fmt: skip


def on_the_cpu(command: str) -> str:
    return f"{command} --device cpu" if " lowband gpu " in command else command


def test_the_documented_commands_make_one_folder(tmp_path: Path) -> None:
    tree = copied(tmp_path)
    export, first, *further = map(on_the_cpu, documented())
    # The first call is cut to some families, as it would be by its time.
    done = run([export, f"{first} --only ceilings overhead softmax", *further], tree)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    out = tree / "build" / "gpu-2"
    items = json.loads((out / "items.json").read_text())
    assert {item["outcome"] for item in items.values()} == {"ok"}
    assert {item["family"] for item in items.values()} == {*PARTS, "tests", "overhead"}
    assert set(json.loads((tree / "build" / "gpu" / "items.json").read_text())) < set(items)
    told = done.stdout.splitlines()
    assert [line.split()[2] for line in told if " s  overhead" in line] == ["overhead:"]  # once, not again
    log = (out / "log.txt").read_text()
    skipped = re.findall(r"SKIPPED \[(\d+)\] tests/gpu/test_(\w+)_gpu\.py", log)
    selected = pd.DataFrame(skipped, columns=["tests", "module"]).astype({"tests": int})
    by_module = selected.groupby("module")["tests"].sum().to_dict()
    assert by_module.keys() == {"engine", "streams", "kernels"}
    assert by_module["kernels"] == len(CASES)  # each once
    engine = json.loads((out / "overhead.json").read_text())
    assert engine["commit"] == COMMIT
    assert [row["dtype"] for row in engine["overhead"]] == ["torch.float32", "torch.bfloat16"]
    assert all(row["engine_s"] > 0 and row["bare_s"] > 0 for row in engine["overhead"])

    folder = tree / "results" / "reference" / "cpu"
    shutil.copytree(out, folder)
    rows = pd.read_csv(folder / "kernels.csv", dtype=str, keep_default_na=False)
    assert set(rows["part"]) == PARTS
    assert not rows.duplicated([*rows.columns[: rows.columns.get_loc("outcome")]]).any()
    assert set(rows["commit"]) == {COMMIT}
    is_flex = rows["implementation"] == "torch.compile flex"  # on a CPU it has no backward
    on_gpus = (rows["implementation"] == "torch cudnn") | (
        is_flex & rows["operation"].str.startswith("backward")
    )
    assert set(rows.loc[on_gpus, "outcome"]) == {"unsupported"}
    rows = rows[~on_gpus]
    assert set(rows["outcome"]) == {"ok"}, rows[rows["outcome"] != "ok"]
    assert (rows["error"].astype(float) <= rows["tolerance"].astype(float)).all()
    times = rows[["time_20_s", "time_s", "time_80_s"]].astype(float).to_numpy()
    assert ((times > 0) & (times[:, :1] <= times)).all()
    assert (times[:, 1] <= times[:, 2]).all()
    assert set(rows["runs"]) == {str(RUNS["cpu"][1])}
    ours = rows[rows["implementation"].str.startswith("triton")]
    made = {tuple(pair) for pair in ours[["part", "operation"]].to_numpy()}
    assert {("attention", "backward"), ("block_quant", "sum_encode int4"), ("softmax", "forward")} <= made
    environment = json.loads((folder / "environment.json").read_text())
    assert (environment["is_interpreted"], environment["torch"]) == (True, torch.__version__)

    for table in ("attention", "training_speed", "kernel_rates"):  # as of a shipped device
        write_table(table, tree, root=tree)
        provenances = set(read_table(tree / f"{table}.csv")["provenance"])
        assert provenances == {"measured", *(["reported"] if table != "kernel_rates" else [])}
    rates = read_table(tree / "kernel_rates.csv")
    assert set(rates["part"]) == {"softmax", "block_quant"}
    assert (rates.loc[rates["implementation"].str.startswith("triton"), "of_copy"] > 0).all()
    assert (rates.loc[rates["implementation"] == "torch", "over_torch"] == 1).all()


COMPILED = """
import torch
from lowband.bench.gpu.kernel_groups import compile_all
parts = ["block_quant", "softmax"]
print(compile_all(torch.device("cpu"), parts, lambda name, _: "int8" not in name, most=2))
"""


@pytest.mark.wide
def test_groups_are_compiled_in_several_processes(tmp_path: Path) -> None:
    done = run([f"export PYTHONPATH={ROOT / 'src'}", f"python -c '{COMPILED}'"], tmp_path)
    assert done.returncode == 0, done.stderr[-4000:]
    assert (
        int(done.stdout.split()[-1]) == 4 + 5
    )  # kernels of ours: of block_quant with 4 bits, and of softmax


@pytest.mark.wide
def test_kernels_of_another_tree_are_measured_in_turns(tmp_path: Path) -> None:
    old = shutil.copytree(
        ROOT / "src" / "lowband" / "kernels", tmp_path / "old" / "src" / "lowband" / "kernels"
    )
    quantize = (old / "block_quant_triton.py").read_text()
    (old / "block_quant_triton.py").write_text(quantize.replace("def decode(", "def renamed(", 1))
    gpu = "python -m lowband gpu --device cpu --only block_quant --out out"
    export = f"export LOWBAND_COMMIT={COMMIT} PYTHONPATH={ROOT / 'src'}"
    done = run([export, f"{gpu} --base old"], tmp_path)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    rows = pd.read_csv(tmp_path / "out" / "base.csv").set_index("item")
    assert set(rows["implementation"]) == {"triton"}
    times = rows.drop(columns="implementation")
    assert list(times) == [f"{whose}_{turn}_s" for turn in (1, 2, 3) for whose in ("ours", "base")]
    is_renamed = times.index.str.contains(" decode ")
    assert (times[~is_renamed] > 0).all(axis=None)
    assert times.loc[is_renamed, times.columns.str.startswith("base")].isna().all(axis=None)
    done = run([export, f"{gpu} --base nothing"], tmp_path)
    assert done.returncode == 2
    assert "nothing: no src/lowband/kernels" in done.stderr
