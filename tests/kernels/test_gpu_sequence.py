"""The sequence of commands that docs/kernels.md gives for a GPU, read from there, on a CPU.

Kernels run under Triton's interpreter, on the small sizes of `--device cpu`; tests of a GPU are collected and
skipped. So every command is one that exists, tests are selected, and several commands make one table.
"""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pandas as pd
import torch
from inner import CASES

from lowband.bench.kernels.measure import RUNS
from lowband.spec.csv_tables import read_table
from lowband.tables.build import write_table

ROOT = Path(__file__).parents[2]
BLOCK = re.compile(r"```\n(export PYTHONPATH=.*?)```", re.DOTALL)
PARTS = {"ceilings", "products", "block_quant", "softmax", "attention", "training"}


def documented() -> list[str]:
    [block] = BLOCK.findall((ROOT / "docs" / "kernels.md").read_text(encoding="utf-8"))
    return [line.partition(" #")[0].strip() for line in block.splitlines()]


def copied(to: Path) -> Path:
    """The tree as it is brought to a GPU machine: no git repository, nothing installed."""
    for name in ("src", "tests", "config", "results/reported"):
        shutil.copytree(ROOT / name, to / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", to)
    return to


def run(commands: list[str], tree: Path) -> subprocess.CompletedProcess[str]:
    script = "\n".join(commands)
    for blank, value in {"<device>": "cpu", "<the commit it was copied from>": "0012345"}.items():
        script = script.replace(blank, value)
    return subprocess.run(
        ["bash", "-exc", script], cwd=tree, capture_output=True, text=True, timeout=2700,
        env={
            **os.environ, "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
            "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "",
        },
    )  # fmt: skip


def on_the_cpu(command: str) -> str:
    return f"{command} --device cpu" if "bench-kernel" in command or "overhead" in command else command


def test_the_documented_sequence_makes_one_table(tmp_path: Path) -> None:
    tree = copied(tmp_path)
    done = run([on_the_cpu(command) for command in documented()], tree)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    skipped = re.findall(r"SKIPPED \[(\d+)\] tests/gpu/test_(\w+)_gpu\.py", done.stdout)
    selected = pd.DataFrame(skipped, columns=["tests", "module"]).astype({"tests": int})
    by_module = selected.groupby("module")["tests"].sum().to_dict()
    assert by_module.keys() == {"engine", "streams", "kernels"}
    assert by_module["kernels"] == len(CASES)  # each once
    engine = json.loads(re.findall(r"^\{.*\}$", done.stdout, re.MULTILINE)[0])["overhead"]
    assert [row["dtype"] for row in engine] == ["torch.float32", "torch.bfloat16"]
    assert all(row["engine_s"] > 0 and row["bare_s"] > 0 for row in engine)

    folder = tree / "results" / "reference" / "cpu"
    rows = pd.read_csv(folder / "kernels.csv", dtype=str, keep_default_na=False)
    assert set(rows["part"]) == PARTS
    assert not rows.duplicated([*rows.columns[: rows.columns.get_loc("outcome")]]).any()
    assert set(rows["commit"]) == {"0012345"}
    is_cudnn = rows["implementation"] == "torch cudnn"
    assert set(rows.loc[is_cudnn, "outcome"]) == {"unsupported"}
    rows = rows[~is_cudnn]
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
