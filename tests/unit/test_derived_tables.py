"""Derived tables of campaigns, on made-up rows whose numbers are worked out by hand."""

import pandas as pd
import pytest

from lowband.evidence.tables.build import builder
from lowband.evidence.tables.entries import TABLES, Table
from lowband.evidence.tables.points import POINT
from tests.refused import refusal


def runs(suite: str, **columns: list[object]) -> pd.DataFrame:
    """Rows of runs.csv. columns: those whose values differ or matter"""
    size = len(next(iter(columns.values())))
    blank = dict.fromkeys(POINT, "-") | {"ranks": 2, "suite": suite}
    return pd.DataFrame({**{name: [value] * size for name, value in blank.items()}, **columns})


def test_delays_are_compared_with_data_parallel_of_the_same_seed() -> None:
    rows = runs(
        "delay", run_id=["a", "b", "c", "d"], scheme=["hsdp", "late", "hsdp", "late"], repeat=[1, 1, 2, 2],
        final_loss=[2.0, 2.25, 3.0, 3.5], parameters=[10, 10, 10, 10],
    )  # fmt: skip
    states = pd.DataFrame(
        {"run_id": ["b", "b", "b", "d"], "state": ["anchor", "outer", "optim", "in_flight"],
         "held_bytes": [40.0, 20.0, 80.0, 30.0]}
    )  # fmt: skip
    table = builder("delays")(rows, states)
    assert list(table["difference"]) == [0, 0.25, 0, 0.5]
    assert list(table["held_bytes_per_parameter"]) == [0, 6, 0, 3]


def test_seldom_exchanges_are_compared_with_ours() -> None:
    rows = runs(
        "seldom-peers", run_id=["a", "b", "c"], engine=["lowband", "ddp", "ddp"],
        scheme=["local-sgd", "local-sgd", "ddp"], repeat=[1, 1, 1], outside_bytes=[1, 1, 1],
        step_time_s=[1.0, 1.0, 1.0],
    )  # fmt: skip
    losses = {"a": 2.0, "b": 2.5, "c": 3.0}
    steps = pd.DataFrame(
        [{"run_id": run, "step": step, "loss": loss + (9 if step == 1 else step % 2)}
         for run, loss in losses.items() for step in range(1, 18)]
    )  # fmt: skip
    table = builder("seldom_peers")(rows, steps)
    assert list(table["last_loss"]) == [2.5, 3.0, 3.5]  # of steps 2 to 17
    assert list(table["system"]) == ["lowband", "DDP + PostLocalSGDOptimizer", "DDP"]
    assert list(table["difference"][:2]) == [0, 0.5]


def test_a_step_is_compared_with_the_peers_in_the_same_turn() -> None:
    steps = pd.DataFrame(
        {"ranks": 2, "scheme": "ddp", "engine": ["hops", "DDP"] * 2, "step": [1, 1, 2, 2],
         "step_s": [3.0, 2.0, 4.0, 5.0], "cpu_s": [1.0, 2.0, 3.0, 4.0], "held_bytes": [7, 8, 7, 8]}
    )  # fmt: skip
    table = builder("joined")(steps).query("engine == 'hops'")
    assert list(table["step_over_peer"]) == pytest.approx([1.5, 0.8])
    assert list(table["cpu_over_peer"]) == pytest.approx([0.5, 0.75])
    assert list(table["held_bytes_other"]) == [8, 8]


def test_the_first_compiled_step_is_apart() -> None:
    steps = pd.DataFrame(
        {"folder": "cpu", "device": "cpu", "ranks": 1, "engine": "module",
         "blocks": ["eager", "compiled"] * 3, "step": [0, 0, 1, 1, 2, 2],
         "step_s": [9.0, 50.0, 2.0, 1.0, 4.0, 2.0]}
    )  # fmt: skip
    [row] = builder("compiled_steps")(steps).to_dict("records")
    assert (row["step_s_eager"], row["step_s_compiled"], row["first_s_compiled"]) == (3, 1.5, 50)
    assert row["compiled_over_eager"] == 0.5


@pytest.mark.parametrize(
    ("build", "line"),
    [
        (None, "tables.yaml: mine: no file lowband/evidence/tables/derived/mine.py (allowed: "),
        ("tables.nope:build", "tables.yaml: mine: no file lowband/evidence/tables/nope.py (allowed: "),
        ("tables.view:nope", "tables.yaml: mine: no 'nope' in tables.view (allowed: "),
    ],
)
def test_a_table_without_its_code_is_refused_in_one_line(
    build: str | None, line: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(TABLES, "mine", Table(name="mine", sources=(), build=build))
    assert refusal(builder, "mine").startswith(line)
