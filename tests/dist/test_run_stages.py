"""Runs along the pipeline axis: the bits of the same run without one; bytes sent and held as closed forms."""

from pathlib import Path
from typing import Any

import pytest
import started

from lowband.cost.stages import stages_states
from lowband.spec.model import ModelSpec
from lowband.spec.records import Outcome
from lowband.spec.run import RunSpec
from lowband.spec.run_folder import RunFolder
from tests.checkout import CONFIG

MODEL = ModelSpec(
    name="small", layers=4, hidden=32, heads=4, vocab=256, seq_len=64, tied_head=False, source="none"
)
TIED = MODEL.model_copy(update={"tied_head": True})
HYBRID = MODEL.model_copy(update={"attention": "linear", "softmax_every": 4})
ROUTED = MODEL.model_copy(update={"experts": 4})
STATES: dict[str, Any] = {"zigzag": False, "context_states": "pass"}
BASE: dict[str, Any] = {
    "seq_len": 32, "micro_batch": 2, "accumulation": 4, "steps": 2, "warmup_steps": 1, "model": MODEL,
    "grad_clip": 0.1,
}  # fmt: skip
WIDE = pytest.mark.wide


def run(folder: Path, **changes: Any) -> tuple[RunSpec, RunFolder, Outcome]:
    changes = {**BASE, **changes}
    found = started.run(folder, **{**changes, "scheme": CONFIG.scheme(changes["scheme"])})
    return RunSpec.read_json(found.spec), found, Outcome.read_json(found.outcome)


CASES = [
    pytest.param({"ranks": 4, "pipeline": 2, "scheme": "zero3"}, 0, marks=WIDE),
    ({"ranks": 4, "pipeline": 2, "scheme": "hpz", "schedule": "zb-v", "recompute": "full"}, 0),
    pytest.param(
        {"ranks": 4, "pipeline": 2, "scheme": "zero1", "schedule": "zb-v", "model": TIED}, 1e-6, marks=WIDE
    ),
    pytest.param(
        {"ranks": 4, "pipeline": 2, "tensor": 2, "scheme": "zero3", "sequence_parallel": True}, 0, marks=WIDE
    ),
    ({"ranks": 4, "pipeline": 4, "scheme": "zero3", "model": TIED}, 1e-6),
    ({"ranks": 4, "pipeline": 2, "tensor": 2, "scheme": "zero1", "model": TIED, "schedule": "zb-h1"}, 1e-6),
    pytest.param({"ranks": 4, "pipeline": 2, "context": 2, "scheme": "zero3"}, 0, marks=WIDE),
    ({"ranks": 4, "pipeline": 2, "context": 2, "scheme": "zero3", "model": HYBRID, **STATES}, 0),
    pytest.param(
        {
            "ranks": 8,
            "pipeline": 2,
            "context": 4,
            "context_attention": "package=heads,node=ring",
            "scheme": "hpz",
            "schedule": "zb-v",
            "recompute": "full",
        },
        0,
        marks=WIDE,
    ),
    pytest.param(
        {
            "ranks": 8,
            "pipeline": 2,
            "context": 2,
            "tensor": 2,
            "sequence_parallel": True,
            "context_attention": "gather",
            "scheme": "zero3",
            "schedule": "interleaved",
            "chunks": 2,
        },
        0,
        marks=WIDE,
    ),
    pytest.param(
        {"ranks": 4, "pipeline": 2, "context": 2, "scheme": "ddp", "schedule": "dualpipe-v", "model": TIED},
        1e-6,
        marks=WIDE,
    ),
    pytest.param(
        {"ranks": 4, "pipeline": 2, "scheme": "hsdp", "model": TIED, "schedule": "breadth", "chunks": 2},
        1e-6,
        marks=WIDE,
    ),
    pytest.param({"ranks": 8, "pipeline": 4, "scheme": "ddp", "model": TIED}, 1e-6, marks=WIDE),
    pytest.param({"ranks": 4, "pipeline": 4, "scheme": "zero1", "schedule": "zb-h1"}, 0, marks=WIDE),
    pytest.param(
        {"ranks": 8, "pipeline": 2, "scheme": "hier3-exact", "chunks": 2, "schedule": "breadth"},
        0,
        marks=WIDE,
    ),
    pytest.param(
        {"ranks": 4, "pipeline": 2, "scheme": "zero3", "chunks": 2, "schedule": "interleaved"}, 0, marks=WIDE
    ),
    pytest.param({"ranks": 4, "pipeline": 2, "scheme": "zero2", "schedule": "dualpipe-v"}, 0, marks=WIDE),
    pytest.param(
        {"ranks": 8, "pipeline": 2, "tensor": 2, "scheme": "zero3", "schedule": "zb-v"}, 0, marks=WIDE
    ),
]


def holds_the_closed_form(spec: RunSpec, outcome: Outcome) -> None:
    held = {state.kind: state.bytes for state in outcome.states}
    assert {kind: held.get(kind, 0) for kind in stages_states(spec)} == stages_states(spec)


def assert_is_the_run_without(folder: Path, changes: dict[str, Any], error: float) -> None:
    """A run in stages has the values of the same run without, and the bytes of the closed forms.

    Both sum gradients over the micro-batches first. A clip bites.
    """
    spec, stages, outcome = run(folder / "stages", **changes)
    whole = {k: v for k, v in changes.items() if k not in ("pipeline", "schedule", "chunks", "layers")}
    whole |= {"ranks": spec.ranks // spec.pipeline, "order": "breadth"}
    _, expected, theirs = run(folder / "whole", **whole)
    mine, other = [*stages.read_steps()], [*expected.read_steps()]
    assert [step.loss for step in mine] == pytest.approx([step.loss for step in other], rel=error, abs=0)
    norms = [step.grad_norm for step in mine]
    assert norms == pytest.approx([step.grad_norm for step in other], rel=max(error, 1e-12))
    assert (outcome.weights_sha256 == theirs.weights_sha256) == (not error)
    assert min(norms) > spec.grad_clip
    holds_the_closed_form(spec, outcome)
    started.sends_the_closed_form(stages)


@pytest.mark.parametrize(("changes", "error"), CASES)
def test_a_run_in_stages_is_the_run_without(tmp_path: Path, changes: dict[str, Any], error: float) -> None:
    assert_is_the_run_without(tmp_path, changes, error)


@pytest.mark.parametrize("ranks", [4, 8])
def test_experts_that_no_two_ranks_have_are_not_gathered(tmp_path: Path, ranks: int) -> None:
    """Of four ranks, two of each stage, no two have the same experts; of eight, two have: these gather."""
    spec, _, outcome = run(tmp_path, ranks=ranks, pipeline=2, expert=2, scheme="zero3", model=ROUTED)
    holds_the_closed_form(spec, outcome)
