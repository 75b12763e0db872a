"""Runs whose stages have different numbers of blocks: the bits of the same run without stages; bytes sent and
held as closed forms; checkpoints that any other division of the blocks reads."""

from pathlib import Path
from typing import Any

import pytest
from near import assert_near
from test_checkpoint_stages import Found, by_name, trained
from test_run_stages import MODEL, WIDE, assert_is_the_run_without

from lowband.run.on_ranks import on_ranks

SEVEN = MODEL.model_copy(update={"layers": 7})
TIED = SEVEN.model_copy(update={"tied_head": True})
CASES: list[Any] = [
    pytest.param({"ranks": 4, "pipeline": 2, "layers": [4, 3], "scheme": "zero3"}, 0, marks=WIDE),
    ({"ranks": 2, "pipeline": 2, "layers": [3, 1, 1, 2], "schedule": "zb-v", "scheme": "zero1"}, 0),
    pytest.param(
        {"ranks": 4, "pipeline": 4, "layers": [3, 2, 1, 1], "accumulation": 2, "scheme": "ddp"}, 0, marks=WIDE
    ),
    (
        {"ranks": 4, "pipeline": 2, "tensor": 2, "layers": [2, 5], "schedule": "zb-h1", "scheme": "zero3"}
        | {"model": TIED, "recompute": "full", "accumulation": 2},
        1e-6,
    ),
    pytest.param(
        {"ranks": 4, "pipeline": 2, "layers": [2, 1, 1, 3], "schedule": "interleaved", "chunks": 2}
        | {"scheme": "hpz", "accumulation": 3},
        0,
        marks=WIDE,
    ),
    pytest.param(
        {"ranks": 8, "pipeline": 2, "layers": [1, 2, 3, 1], "schedule": "breadth", "chunks": 2}
        | {"scheme": "hier3-exact"},
        0,
        marks=WIDE,
    ),
    pytest.param(
        {"ranks": 4, "pipeline": 2, "context": 2, "layers": [2, 5], "schedule": "zb-h2", "scheme": "zero3"},
        0,
        marks=WIDE,
    ),
    pytest.param(
        {"ranks": 4, "pipeline": 2, "layers": [1, 3, 2, 1], "schedule": "dualpipe-v", "scheme": "zero2"},
        0,
        marks=WIDE,
    ),
]


@pytest.mark.parametrize(("changes", "error"), CASES)
def test_a_run_in_uneven_stages_is_the_run_without(
    tmp_path: Path, changes: dict[str, Any], error: float
) -> None:
    """Also with fewer micro-batches than ranks."""
    assert_is_the_run_without(tmp_path, {"model": SEVEN, **changes}, error)


def test_a_checkpoint_is_read_under_any_layers(tmp_path: Path) -> None:
    """Saved with five blocks and two, read with one and six, in a V, and on one rank without stages."""
    in_two = {"pipeline": 2}
    saved: list[Found] = on_ranks(2, trained, tmp_path, in_two, 0, "1f1b", SEVEN, [5, 2])
    for ranks, axes, schedule, layers, error in (
        (2, in_two, "1f1b", [1, 6], 0),
        (2, in_two, "zb-v", [2, 1, 1, 3], 0),
        (1, {}, "1f1b", [], 1e-5),
    ):
        again: list[Found] = on_ranks(ranks, trained, tmp_path, axes, 1, schedule, SEVEN, layers)
        assert again[0][0] == pytest.approx(saved[0][0][1:], rel=error, abs=0)
        assert_near(by_name(again), by_name(saved), rtol=10 * error, atol=2 * error)
