"""The benchmark of kernels, small, under the interpreter; what goes wrong in a case is a row, not the end."""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest
import torch

from lowband.bench.kernels.measure import RUNS, KernelCase, measure
from lowband.bench.kernels.rows import clocks, environment, kept_rows, write_environment, write_rows
from lowband.errors import UserError
from lowband.spec.csv_tables import read_benchmark
from lowband.spec.kernel_rows import KernelRow

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
        timeout=900,
        env={**os.environ, "TRITON_INTERPRET": interpret, "OMP_NUM_THREADS": "1"},
    )


def rows_of(folder: Path) -> list[dict[str, str]]:
    """Each cell its text."""
    rows = pd.read_csv(folder / "kernels.csv", dtype=str, keep_default_na=False)
    return rows.to_dict("records")


def test_parts_made_by_several_commands_are_one_table(tmp_path: Path) -> None:
    """Rows of other parts stay as they were written, if the same source made them on the same device."""
    # Text that looks like numbers, or like a missing value; a comma, quotes and a line's end in a cell.
    found = {**environment(CPU), "commit": "0012345", "torch": "2.10"}
    row = KernelRow(
        part="softmax", operation="forward", implementation="x", dtype="float32", model="nan", causal=True,
        reason='a, "b"\nc', runs=5, time_s=0.1 + 0.2,
    )  # fmt: skip
    write_environment(found, tmp_path / "environment.json")
    first = [row, replace(row, part="attention", runs=None), replace(row, part="training", time_s=2.0)]
    write_rows(first, found, tmp_path / "kernels.csv", kept_rows(tmp_path / "nothing", found, []))
    before = rows_of(tmp_path)
    kept = kept_rows(tmp_path, found, ["training"])
    write_rows([replace(row, part="training")], {**found, "commit": "1e9"}, tmp_path / "kernels.csv", kept)
    after = rows_of(tmp_path)
    assert after[:2] == before[:2]
    assert [row["runs"] for row in after] == ["5", "", "5"]
    assert {row["time_s"] for row in after} == {"0.30000000000000004"}
    assert [row["part"] for row in after] == ["softmax", "attention", "training"]
    assert [row["commit"] for row in after] == ["0012345", "0012345", "1e9"]
    read = read_benchmark(tmp_path / "kernels.csv").iloc[0]
    told = read[["commit", "torch", "model", "reason", "time_s"]].tolist()
    assert told == ["0012345", "2.10", "nan", row.reason, row.time_s]
    assert kept_rows(tmp_path, {**found, "source_sha256": "other"}, []).empty


def test_without_a_gpu_ours_is_unsupported_and_torchs_is_timed(tmp_path: Path) -> None:
    """Also where pydantic and PyYAML are missing, as on a bare GPU machine; training then is no error."""
    arguments = ("bench-kernel", "--device", "cpu", "--only", "softmax", "training", "--out", str(tmp_path))
    done = lowband(*arguments, start=("-c", BARE))
    assert done.returncode == 0, done.stdout + done.stderr
    outcomes = {(row["implementation"].split()[0], row["outcome"]) for row in rows_of(tmp_path)}
    assert outcomes == {
        ("triton", "unsupported"), ("torch", "ok"), ("sdpa", "unsupported"), ("flash2", "unsupported")
    }  # fmt: skip
    [reason] = {row["reason"] for row in rows_of(tmp_path) if row["part"] == "training"}
    assert "pydantic" in reason


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


def case(name: str, make, error: float = 0.0) -> KernelCase:
    row = KernelRow(part="p", operation="o", implementation=name, dtype="float32")
    return KernelCase(row=row, make=make, error_of=lambda _result: error, tolerance=0.5)


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
