"""`lowband gpu` without a GPU: the order, the cut at a faked clock, and how one folder continues another."""

import json
import os
import select
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch

from lowband.bench.gpu import folder as folders
from lowband.bench.gpu.families import FAMILIES, sources_sha256
from lowband.bench.gpu.folder import Folder
from lowband.bench.gpu.kernel_groups import groups
from lowband.bench.gpu.programs import items, run_all
from lowband.bench.gpu.queue import Item, work
from lowband.bench.kernels import PARTS
from lowband.errors import UserError
from lowband.spec.kernel_rows import KernelRow
from tests.called import called
from tests.checkout import REFERENCE, ROOT
from tests.refused import refusal

ENVIRONMENT = {
    "device": "a GPU", "commit": "1" * 40, "torch": "2.11", "triton": "3.6.0", "measurement_version": 3,
    "is_interpreted": False,
}  # fmt: skip
ROW = KernelRow(part="softmax", operation="forward", implementation="triton", dtype="float32", rows=1)
BARE = """
import sys
sys.modules["pydantic"] = None
from lowband.__main__ import main
sys.exit(main(["gpu", "--out", sys.argv[1], "--device", "cpu"]))
"""


class Bench:
    """Items that take what they are said to take, on a clock of their own."""

    def __init__(self, folder: Folder) -> None:
        self.folder, self.seconds, self.ran = folder, 0.0, []

    def item(
        self, name: str, value: float, seconds: float, takes: float | None = None, outcome: str = "ok"
    ) -> Item:
        def run(_left_s: float) -> tuple[str, str, list[dict[str, Any]]]:
            self.ran.append(name)
            self.seconds += seconds if takes is None else takes
            return outcome, "", [asdict(replace(ROW, operation=name))]

        return Item(
            name=name, family="softmax", value=value, seconds=seconds, run=run,
            not_run=lambda reason: [asdict(replace(ROW, operation=name, outcome="not run", reason=reason))],
        )  # fmt: skip

    def work(self, items: list[Item], end_s: float) -> list[str]:
        self.ran = []
        work(items, self.folder, end_s, lambda: self.seconds, lambda _line: None)
        return self.ran


def begin(path: Path, earlier: Path | None = None, **changes: Any) -> Folder:
    return Folder.begin(path, ENVIRONMENT | changes, earlier)


def outcomes(folder: Folder) -> dict[str, str]:
    return {name: entry.outcome for name, entry in folder.entries.items()}


def test_what_is_worth_most_a_second_is_first_and_what_does_not_fit_is_left(tmp_path: Path) -> None:
    bench = Bench(begin(tmp_path / "a"))
    items = [
        bench.item("dear", 30, 60), bench.item("cheap", 1, 1), bench.item("best", 10, 1),
        bench.item("last", 1, 5),
    ]  # fmt: skip
    assert bench.work(items, 10) == ["best", "cheap", "last"]
    assert outcomes(bench.folder) == {"best": "ok", "cheap": "ok", "dear": "not run", "last": "ok"}
    rows = pd.read_csv(tmp_path / "a" / "kernels.csv").set_index("operation")
    assert rows.loc["dear", ["outcome", "reason"]].tolist() == ["not run", "takes about 60 s, 8 s were left"]
    assert set(rows["commit"].astype(str)) == {"1" * 40}


def test_what_takes_longer_than_expected_leaves_less_to_the_others(tmp_path: Path) -> None:
    bench = Bench(begin(tmp_path))
    items = [bench.item("slow", 9, 1, takes=9.5), bench.item("next", 1, 1), bench.item("small", 0.1, 0.5)]
    assert bench.work(items, 10) == ["slow", "small"]


def test_a_further_call_does_what_is_missing_failed_or_of_other_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = Bench(begin(tmp_path / "a"))
    items = [bench.item("well", 3, 1), bench.item("bad", 2, 1, outcome="error"), bench.item("late", 1, 9)]
    assert bench.work(items, 5) == ["well", "bad"]
    (tmp_path / "a" / "overhead.json").write_text("{}")
    (tmp_path / "a").chmod(0o500)
    again = Bench(begin(tmp_path / "b", earlier=tmp_path / "a"))
    assert (tmp_path / "b" / "overhead.json").read_text() == "{}"
    items = [again.item("well", 3, 1), again.item("bad", 2, 1), again.item("late", 1, 9)]
    assert again.work(items, 20) == ["bad", "late"]
    assert again.work(items, 40) == []
    assert (tmp_path / "b").stat().st_mode & 0o200
    assert set(outcomes(Folder.read(tmp_path / "b")).values()) == {"ok"}
    assert list(pd.read_csv(tmp_path / "b" / "kernels.csv")["outcome"]) == ["ok"] * 3
    monkeypatch.setattr(folders, "sources_sha256", lambda family: f"other {family}")
    assert again.work(items, 60) == ["well", "bad", "late"]


@pytest.mark.parametrize(
    "key, other",
    [("device", "another GPU"), ("commit", "2" * 40), ("triton", "3.7.1"), ("measurement_version", 2)],
)
def test_a_folder_is_of_one_device_and_one_commit(tmp_path: Path, key: str, other: object) -> None:
    begin(tmp_path / "a")
    assert refusal(begin, tmp_path / "b", tmp_path / "a", **{key: other}) == (
        f"{tmp_path / 'a'}: rows of {key} {ENVIRONMENT[key]}, and here it is {other} "
        "(allowed: the same, or a folder of their own)"
    )
    assert not (tmp_path / "b").exists()


def test_rows_are_not_overwritten_by_a_call_that_does_not_continue_them(tmp_path: Path) -> None:
    begin(tmp_path)
    with pytest.raises(UserError, match="has rows already"):
        begin(tmp_path)
    assert begin(tmp_path, tmp_path).entries == {}


@pytest.mark.parametrize("name", ["items.json", "environment.json"])
@pytest.mark.parametrize("text", ["", "[]", "{", '{"a": 1}', '{"a": {"family": "softmax"}}', "null"])
def test_a_damaged_folder_is_refused_in_one_line(tmp_path: Path, name: str, text: str) -> None:
    bench = Bench(begin(tmp_path))
    bench.work([bench.item("well", 3, 1)], 5)
    (tmp_path / name).write_text(text)
    with pytest.raises(UserError, match="is damaged"):
        Folder.read(tmp_path)
    (tmp_path / name).unlink()
    with pytest.raises(UserError, match=f"no {name}"):
        Folder.read(tmp_path)


def test_a_program_ends_when_the_time_does_with_all_of_its_processes(tmp_path: Path) -> None:
    os.mkfifo(alive := tmp_path / "alive")
    forever = f"import os, threading; file = open({str(alive)!r}, 'w'); os.fork(); threading.Event().wait()"
    reader = os.open(alive, os.O_RDONLY | os.O_NONBLOCK)
    outcome, reason, _ = run_all([(sys.executable, "-c", forever)], tmp_path / "log.txt")(2.0)
    assert (outcome, reason) == ("not run", "killed after the 2 s that were left")
    ended, _, _ = select.select([reader], [], [], 100)  # its end shows when the last of them has gone
    assert ended and os.read(reader, 1) == b""
    os.close(reader)


def test_what_a_program_ends_with_is_its_outcome(tmp_path: Path) -> None:
    def commands(*codes: int) -> list[tuple[str, ...]]:
        return [(sys.executable, "-c", f"print('of {code}'); raise SystemExit({code})") for code in codes]

    assert run_all(commands(0, 0), tmp_path / "a.txt")(60.0) == ("ok", "", [])
    assert run_all(commands(0, 3, 4), tmp_path / "b.txt")(60.0) == ("error", "exit code 3: see b.txt", [])
    assert "of 3" in (tmp_path / "b.txt").read_text()
    assert "of 4" not in (tmp_path / "b.txt").read_text()


def test_a_missing_package_is_told_at_once_with_its_wheels(tmp_path: Path) -> None:
    done = called(sys.executable, "-c", BARE, tmp_path / "out")
    assert (done.returncode, done.stderr) == (
        2,
        "lowband: lowband gpu: pydantic is missing (allowed: wheels of pydantic, pydantic_core, "
        "annotated_types and typing_inspection, for this Python)\n",
    )
    assert not (tmp_path / "out").exists()


def test_a_family_is_known_by_its_own_files(tmp_path: Path) -> None:
    for name in (
        "kernels/block_quant.py",
        "kernels/device.py",
        "spec/wire.py",
        "bench/kernels/measure.py",
        "bench/kernels/block_quant.py",
    ):
        path = tmp_path / "src" / "lowband" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("a = 1\n")
    before = sources_sha256("block_quant", tmp_path)
    (tmp_path / "src" / "lowband" / "kernels" / "softmax.py").write_text("b = 1\n")
    assert sources_sha256("block_quant", tmp_path) == before
    (tmp_path / "src" / "lowband" / "kernels" / "block_quant.py").write_text("a = 2\n")
    assert sources_sha256("block_quant", tmp_path) != before
    with pytest.raises(UserError, match="no file"):
        sources_sha256("softmax", tmp_path)
    assert all(sources_sha256(family) for family in FAMILIES)


def test_items_of_kernels_have_names_of_their_own_and_costs() -> None:
    names = [name for name, _, _ in groups(torch.device("cuda"), list(PARTS))]
    assert len(names) == len(set(names))
    assert set(PARTS) <= set(FAMILIES)
    for device in ("h100", "h200"):
        costs = json.loads((REFERENCE / device / "costs.json").read_text())
        assert set(costs) <= {*names, *(item.name for item in items(Path(), "cuda", list(FAMILIES)))}
        not_measured_yet = {"experts", "attention_kinds"}
        assert {name.partition(" ")[0] for name in costs} >= set(PARTS) - not_measured_yet


def test_a_program_has_this_tree_and_the_wheels_that_were_brought_along(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "brought_along.py").write_text("")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    program = "import brought_along, lowband; print(lowband.__file__)"
    assert run_all([(sys.executable, "-c", program)], tmp_path / "log.txt")(600.0)[0] == "ok"
    assert str(ROOT / "src") in (tmp_path / "log.txt").read_text()
