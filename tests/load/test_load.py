"""Memory of commands on many runs, and the benchmark itself on few."""

import tracemalloc
from pathlib import Path

import pytest

from lowband.evidence.tables.collect import collect
from lowband.evidence.tables.derived.load import build
from lowband.spec.csv_tables import read_table
from tests.load import made
from tests.load.__main__ import Job, import_log, measured

STEPS = 300


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("load")
    return made.run_folders(made.tree(folder / "tree", made.POINTS, STEPS), folder / "runs")


def peak_bytes(runs: list[Path], out: Path) -> int:
    collect(runs, out)  # what is imported and cached once does not count
    tracemalloc.start()
    collect(runs, out)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return peak


def test_steps_of_one_run_at_a_time_are_held(runs: list[Path], tmp_path: Path) -> None:
    """20 runs take little more than the largest one: besides its steps the specs and outcomes of all."""
    largest = max(runs, key=lambda run: (run / "steps.jsonl").stat().st_size)
    alone, all_of_them = peak_bytes([largest], tmp_path), peak_bytes(runs, tmp_path)
    assert all_of_them < 1.7 * alone
    assert (tmp_path / "steps.csv").stat().st_size > 2 * all_of_them / 3
    assert len(read_table(tmp_path / "steps.csv")) == made.POINTS * STEPS


def test_a_command_is_measured(tmp_path: Path) -> None:
    imports = Job(["timeit", "-n1", "-r1", "import lowband.evidence.importers, pandas"], tmp_path, 0)
    idle = int(measured("idle", 0, imports)["peak_bytes"])
    held = b"x" * (3 * idle)  # by this process, whose peak is not the command's
    row = measured("import-log", 50, import_log(50, tmp_path))
    del held
    assert len(read_table(tmp_path / "steps.csv")) == 50
    assert int(row["input_bytes"]) == (tmp_path / "train.log").stat().st_size
    assert float(row["cpu_s"]) > 0
    assert idle / 2 < int(row["peak_bytes"]) < 2 * idle


def test_goals_are_compared_at_their_size_only(tmp_path: Path) -> None:
    text = "part,size,input_bytes,cpu_s,wall_s,peak_bytes,commit\n"
    text += "collect,100,5,600,1,1,c\ncollect,10000,5,60,1,3221225472,c\nplan,2000,0,45,1,1,c\n"
    (tmp_path / "load.csv").write_text(text)
    built = build(read_table(tmp_path / "load.csv"))
    assert built["limit_s"].fillna(-1).tolist() == [-1, 120, 60]
    assert built["limit_bytes"].fillna(-1).tolist() == [-1, 2**31, -1]
