"""Runs whose stages have different numbers of blocks: the bits of the same run without stages; bytes sent and
held as closed forms; checkpoints that any other division of the blocks reads."""

from pathlib import Path
from typing import Any

import pytest
from test_run_stages import MODEL, run

from lowband.cost.contents import step_bytes
from lowband.cost.stages import stages_states

SEVEN = MODEL.model_copy(update={"layers": 7})
SEVEN_TIED = SEVEN.model_copy(update={"tied_head": True})
CASES: list[Any] = [
    ({"ranks": 4, "pipeline": 2, "layers": [4, 3], "scheme": "zero3"}, 0),
    ({"ranks": 2, "pipeline": 2, "layers": [3, 1, 1, 2], "schedule": "zb-v", "scheme": "zero1"}, 0),
    ({"ranks": 4, "pipeline": 4, "layers": [3, 2, 1, 1], "accumulation": 2, "scheme": "ddp"}, 0),
]


@pytest.mark.parametrize(("changes", "error"), CASES)
def test_a_run_in_uneven_stages_is_the_run_without(
    tmp_path: Path, changes: dict[str, Any], error: float
) -> None:
    """Also with fewer micro-batches than ranks."""
    spec, folder, outcome = run(tmp_path / "stages", **{"model": SEVEN, **changes})
    whole = {k: v for k, v in changes.items() if k not in ("pipeline", "schedule", "layers")}
    whole |= {"ranks": spec.ranks // spec.pipeline, "order": "breadth"}
    _, expected, theirs = run(tmp_path / "whole", **{"model": SEVEN, **whole})
    mine, other = [*folder.read_steps()], [*expected.read_steps()]
    assert [step.loss for step in mine] == pytest.approx([step.loss for step in other], rel=error, abs=0)
    assert (outcome.weights_sha256 == theirs.weights_sha256) == (not error)
    held = {state.kind: state.bytes for state in outcome.states}
    assert {kind: held.get(kind, 0) for kind in stages_states(spec)} == stages_states(spec)
    for step in mine[1:]:
        assert {(s.level, s.collective, s.wire): s.bytes for s in step.sent} == step_bytes(spec)
