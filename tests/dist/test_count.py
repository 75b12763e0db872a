"""Runs on fake tensors: the engine at ranks that no machine here has, against the closed forms."""

from pathlib import Path
from typing import Any

import pytest
import torch
from started import begun, ended

from lowband.cost.bytes import unit_numels
from lowband.cost.contents import step_bytes
from lowband.cost.memory import state_bytes
from lowband.errors import UserError
from lowband.run.count_fake import count
from lowband.spec.axes import Axes
from lowband.spec.records import Outcome, by_row
from lowband.spec.run import RunSpec
from lowband.spec.step import Order
from tests.checkout import CONFIG

# A few layers of the 20B model: the same sizes of every message, a part of the time.
WIDE = pytest.mark.wide
CASES = [
    ("volume", "zeropp", 1, "depth", {}),
    ("volume", "hier3", 2, "breadth", {}),
    ("volume3072", "zero3", 1, "depth", {"tensor": 8}),
    pytest.param("volume", "hier3", 2, "depth", {}, marks=WIDE),
    pytest.param("volume", "hsdp", 1, "depth", {}, marks=WIDE),
    pytest.param("volume3072", "hier3", 1, "depth", {}, marks=WIDE),
    pytest.param("volume3072", "hier3", 2, "depth", {"tensor": 2, "collectives": "flat"}, marks=WIDE),
]


@pytest.mark.parametrize(("suite", "scheme", "accumulation", "order", "changes"), CASES)
def test_counted_at_scale_equals_closed_forms(
    tmp_path: Path, suite: str, scheme: str, accumulation: int, order: Order, changes: dict[str, Any]
) -> None:
    [spec] = [spec for spec in CONFIG.runs([suite]) if spec.scheme.name == scheme]
    few_layers = spec.model.model_copy(update={"layers": 2})
    spec = spec.model_copy(
        update={"model": few_layers, "accumulation": accumulation, "order": order, **changes}
    )
    path = tmp_path / "spec.json"
    path.write_text(RunSpec.parse(spec.model_dump(), "test").to_json())
    code, error = ended(begun(path), path)
    assert code == 0, error
    outcome = Outcome.read_json(tmp_path / "outcome.json")
    sent = by_row(outcome.sent)
    assert sent == step_bytes(spec)
    assert ("leave_reduce" in {s.collective for s in outcome.sent}) == (spec.tensor > 1)
    units = unit_numels(spec.model, spec.levels, Axes(tensor=spec.tensor))
    held = {state.kind: state.bytes for state in outcome.states}
    levels = spec.levels
    expected = state_bytes(
        units, spec.scheme, levels, "bf16", "bf16", accumulation, "fake", spec.collectives, order
    )
    assert {kind: held.get(kind, 0) for kind in expected} == expected
    assert not (tmp_path / "steps.jsonl").exists()


def test_a_torch_without_collectives_on_fake_tensors_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch 2.10 ends with c10d's UnsupportedOperatorException."""
    monkeypatch.setattr(torch, "__version__", "2.10.0+rocm7.1")
    [spec, *_] = CONFIG.runs(["volume"])
    with pytest.raises(
        UserError, match=r"^volume-.*: torch 2.10.0\+rocm7.1 has no .* .allowed: torch 2.11 or later.$"
    ):
        count(spec)
