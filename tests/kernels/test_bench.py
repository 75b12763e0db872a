"""The benchmark of kernels, small, under the interpreter; what goes wrong in a case is a row, not the end."""

import csv
import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from lowband.errors import UserError
from lowband.report.derive import write_table
from lowband.report.files import read_table
from lowband.run.bench.measure import RUNS, Case, measure
from lowband.run.bench.rows import Row, clocks, environment, kept_rows, write_environment, write_rows

ROOT = Path(__file__).parents[2]
CPU = torch.device("cpu")
# As where pydantic and PyYAML are not installed.
BARE = """
import sys
sys.modules["pydantic"] = sys.modules["yaml"] = None
from lowband.__main__ import main
sys.exit(main(sys.argv[1:]))
"""


def lowband(*arguments: str, interpret: str = "0", start: tuple[str, ...] = ("-m", "lowband")):
    return subprocess.run(
        [sys.executable, *start, *arguments],
        capture_output=True,
        text=True,
        timeout=280,
        env={**os.environ, "TRITON_INTERPRET": interpret, "OMP_NUM_THREADS": "1"},
    )


def rows_of(folder: Path) -> list[dict[str, str]]:
    with (folder / "kernels.csv").open() as file:
        return list(csv.DictReader(file))


def test_parts_made_by_several_commands_are_one_table(tmp_path: Path) -> None:
    """Rows of other parts stay as they were written, if the same source made them on the same device."""
    found = {**environment(CPU), "commit": "first"}
    row = Row(
        part="softmax", operation="forward", implementation="x", dtype="float32", causal=True, time_s=0.1
    )
    write_environment(found, tmp_path / "environment.json")
    write_rows([row, replace(row, part="training")], found, tmp_path / "kernels.csv", [])
    kept = kept_rows(tmp_path, found, ["training"])
    write_rows([replace(row, part="training")], {**found, "commit": "second"}, tmp_path / "kernels.csv", kept)
    told = [(row["part"], row["commit"], row["time_s"]) for row in rows_of(tmp_path)]
    assert told == [("softmax", "first", "0.1"), ("training", "second", "0.1")]
    assert kept_rows(tmp_path, {**found, "source_sha256": "other"}, []) == []


def test_every_part_runs_under_the_interpreter(tmp_path: Path) -> None:
    done = lowband("bench-kernel", "--device", "cpu", "--out", str(tmp_path), interpret="1")
    assert done.returncode == 0, done.stdout + done.stderr
    rows = rows_of(tmp_path)
    assert {row["part"] for row in rows} == {"ceilings", "block_quant", "softmax", "attention", "training"}
    for row in rows:
        if row["implementation"] == "torch cudnn":
            assert row["outcome"] == "unsupported"
            continue
        assert row["outcome"] == "ok", row
        assert float(row["error"]) <= float(row["tolerance"])
        assert 0 < float(row["time_20_s"]) <= float(row["time_s"]) <= float(row["time_80_s"])
        assert int(row["runs"]) == RUNS["cpu"][1]
    ours = {(row["part"], row["operation"]) for row in rows if row["implementation"].startswith("triton")}
    assert {("attention", "backward"), ("block_quant", "sum_encode int4"), ("softmax", "forward")} <= ours
    shutil.copytree(ROOT / "results" / "reported", tmp_path / "results" / "reported")
    device = tmp_path / "results" / "reference" / "cpu"  # as if it were shipped
    device.mkdir(parents=True)
    shutil.copy(tmp_path / "kernels.csv", device)
    for table in ("attention", "training_speed", "kernel_rates"):
        write_table(table, tmp_path, root=tmp_path)
        provenances = set(read_table(tmp_path / f"{table}.csv")["provenance"])
        assert provenances == {"measured", *(["reported"] if table != "kernel_rates" else [])}
    rates = read_table(tmp_path / "kernel_rates.csv")
    assert set(rates["part"]) == {"softmax", "block_quant"}
    assert (rates.loc[rates["implementation"].str.startswith("triton"), "of_copy"] > 0).all()
    assert (rates.loc[rates["implementation"] == "torch", "over_torch"] == 1).all()
    environment = json.loads((tmp_path / "environment.json").read_text())
    assert environment["is_interpreted"] is True
    assert environment["torch"] == torch.__version__


def test_without_a_gpu_ours_is_unsupported_and_torchs_is_timed(tmp_path: Path) -> None:
    """Also where pydantic and PyYAML are missing, as on a bare GPU machine."""
    arguments = ("bench-kernel", "--device", "cpu", "--only", "softmax", "--out", str(tmp_path))
    done = lowband(*arguments, start=("-c", BARE))
    assert done.returncode == 0, done.stdout + done.stderr
    outcomes = {(row["implementation"].split()[0], row["outcome"]) for row in rows_of(tmp_path)}
    assert outcomes == {("triton", "unsupported"), ("torch", "ok")}


def test_clocks_are_what_nvidias_tool_reports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool = tmp_path / "nvidia-smi"
    tool.write_text('#!/bin/sh\necho "$@" > "$0.asked"\necho "1980 MHz, 1980 MHz, 3201 MHz, 700.00 W"\n')
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert clocks("GPU-7") == {
        "clocks.sm": "1980 MHz",
        "clocks.max.sm": "1980 MHz",
        "clocks.mem": "3201 MHz",
        "power.limit": "700.00 W",
    }
    assert "--id=GPU-7" in (tmp_path / "nvidia-smi.asked").read_text()
    tool.write_text("#!/bin/sh\necho No devices were found >&2; exit 6\n")
    assert clocks("GPU-7") is None
    tool.unlink()
    assert clocks("GPU-7") is None


def test_a_missing_gpu_is_told(tmp_path: Path) -> None:
    if torch.cuda.is_available():
        return
    done = lowband("bench-kernel", "--out", str(tmp_path))
    assert (done.returncode, done.stderr) == (
        2,
        "lowband: --device: there is no CUDA or ROCm device (allowed: cpu)\n",
    )


def case(name: str, make, error: float = 0.0) -> Case:
    row = Row(part="p", operation="o", implementation=name, dtype="float32")
    return Case(row=row, make=make, error_of=lambda _result: error, tolerance=0.5)


def raising(error: Exception):
    def make():
        raise error

    return make


def test_what_goes_wrong_is_an_outcome() -> None:
    calls = []
    group = [
        case("right", lambda: lambda: calls.append("right")),
        case("wrong", lambda: lambda: calls.append("wrong"), error=0.6),
        case("nan", lambda: lambda: None, error=float("nan")),
        case("oom", raising(torch.OutOfMemoryError("too much\nof it"))),
        case("unsupported", raising(UserError("not here", where="k"))),
        case("error", raising(ValueError("a bug"))),
    ]
    rows = {row.implementation: row for row in measure(group, CPU, lambda: True)}
    assert {name: row.outcome for name, row in rows.items()} == {
        "right": "ok",
        "wrong": "wrong",
        "nan": "wrong",
        "oom": "oom",
        "unsupported": "unsupported",
        "error": "error",
    }
    assert rows["oom"].reason == "OutOfMemoryError: too much"
    assert rows["error"].reason == "ValueError: a bug"
    assert rows["right"].time_s is not None
    assert all(rows[name].time_s is None for name in rows if name != "right")
    assert calls.count("wrong") + RUNS["cpu"][0] < calls.count("right") + 1


def test_nothing_is_begun_out_of_time() -> None:
    [row] = measure([case("late", raising(AssertionError("begun")))], CPU, lambda: False)
    assert (row.outcome, row.reason) == ("not run", "out of time")
