"""PyTorch's own axes as a peer on the same ranks: FSDP2 beside `parallelize_module` and in stages."""

from pathlib import Path
from typing import Any

import pytest
import torch
from test_peers import BOUND, MODEL, run

from lowband.spec.records import Outcome
from lowband.spec.run import RunSpec
from lowband.spec.run_folder import RunFolder
from lowband.trainers.torch_axes import _apart, _together

# Rows and heads that two tensor ranks divide, layers that four stages divide.
EVEN = MODEL.model_copy(
    update={"layers": 4, "hidden": 48, "heads": 4, "vocab": 256, "tied_head": False, "name": "even"}
)
WIDE = pytest.mark.wide
BASE: dict[str, Any] = {
    "model": EVEN, "micro_batch": 2, "accumulation": 4, "steps": 4, "warmup_steps": 2, "grad_clip": 0.5,
}  # fmt: skip


def sent(outcome: Outcome, *collectives: str) -> int:
    """By the first rank, as torch dispatched it."""
    return sum(one.bytes for one in outcome.outside if one.collective in collectives)


def both(folder: Path, ranks: int, scheme: str, **changes: Any) -> tuple[RunSpec, Outcome, Outcome]:
    """Our run and the peer's, which have the same losses and weights."""
    spec, ours, outcome = run(folder, "lowband", scheme, ranks, **{**BASE, **changes})
    _, losses, theirs = run(folder, "fsdp2", scheme, ranks, **{**BASE, **changes})
    assert theirs.status == "ok", theirs.cause
    assert losses == pytest.approx(ours, rel=0, abs=BOUND)
    assert theirs.weights_sha256
    return spec, outcome, theirs


STAGES = [
    (2, "zero3", {"pipeline": 2}),
    pytest.param(4, "zero3", {"pipeline": 2, "schedule": "gpipe"}, marks=WIDE),
    pytest.param(4, "zero2", {"pipeline": 4}, marks=WIDE),
    pytest.param(4, "zero3", {"pipeline": 2, "schedule": "interleaved", "chunks": 2}, marks=WIDE),
    pytest.param(4, "zero3", {"pipeline": 2, "schedule": "breadth", "chunks": 2}, marks=WIDE),
]


@pytest.mark.parametrize(("ranks", "scheme", "changes"), STAGES)
def test_torchs_pipelining(tmp_path: Path, ranks: int, scheme: str, changes: dict[str, Any]) -> None:
    """Between stages both send the same bytes. Of weights and gradients ours sends no more."""
    spec, ours, theirs = both(tmp_path, ranks, scheme, **changes)
    x = spec.micro_batch * spec.seq_len * spec.model.hidden * 4
    crossings = 2 * spec.chunks_each - 1  # from the first rank's stages
    assert sent(theirs, "send") == crossings * spec.accumulation * x
    assert sent(ours, "send") >= sent(theirs, "send")  # with those that are collectives' hops
    states = "all_gather", "reduce_scatter"
    assert (sent(theirs, *states) > 0) == (spec.levels.world > 1)


@WIDE
def test_torchs_tensor_axis(tmp_path: Path) -> None:
    model = EVEN.model_copy(update={"layers": 2})
    spec, _, theirs = both(tmp_path, 4, "zero3", tensor=2, model=model, accumulation=2)
    tokens = spec.micro_batch * spec.seq_len * spec.accumulation
    x = tokens * spec.model.hidden * 4
    per_block, embedding, head = 4 * x, x, x
    assert sent(theirs, "all_reduce") == per_block * spec.model.layers + embedding + head


@WIDE
def test_both_of_them(tmp_path: Path) -> None:
    both(tmp_path, 4, "zero3", tensor=2, pipeline=2)


@pytest.mark.parametrize(
    ("changes", "cause"),
    [
        ({"pipeline": 2, "schedule": "zb-h1"}, "no counterpart: torch has no schedule zb-h1 (allowed: gpi"),
        ({"pipeline": 2, "schedule": "zb-v"}, "zb-v under FSDP2 loses gradients (allowed: gpipe, 1f1b, "),
        ({"pipeline": 2, "model": EVEN.model_copy(update={"tied_head": True})}, "a tied head is not cut"),
        ({"tensor": 2, "sequence_parallel": True}, "sequence parallelism is not set up"),
    ],
)
def test_what_torch_has_not_is_an_outcome(tmp_path: Path, changes: dict[str, Any], cause: str) -> None:
    _, _, outcome = run(tmp_path, "fsdp2", "zero3", 4, **{**BASE, **changes})
    assert outcome.status == "not run"
    assert cause in outcome.cause


def test_numbers_that_torchs_schedule_refuses_are_told_in_a_line(tmp_path: Path) -> None:
    changes = {"pipeline": 4, "accumulation": 2}
    _, _, outcome = run(tmp_path, "fsdp2", "zero3", 4, **{**BASE, **changes})
    assert outcome.status == "error"
    assert "no counterpart: Number of microbatches" in outcome.cause
    assert "\n" not in outcome.cause


@pytest.mark.wide
def test_torchs_split_backward_loses_gradients_under_fsdp2(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A fault of torch 2.13; if this fails it may have been mended: then let these schedules run."""
    changes = {**BASE, "pipeline": 2, "schedule": "zb-v"}
    spec, _, _ = run(tmp_path, "lowband", "zero3", 2, **changes)
    monkeypatch.setattr(RunSpec, "check_engine", lambda _: None)
    twin, _, _ = run(tmp_path, "fsdp2", "zero3", 2, **changes)
    [ours, *_], [theirs, *_] = (RunFolder(tmp_path / each.run_id).read_steps() for each in (spec, twin))
    assert theirs.loss == pytest.approx(ours.loss, abs=BOUND)
    assert theirs.grad_norm < 0.7 * ours.grad_norm


def test_a_checksums_weights_are_in_the_models_order() -> None:
    rows = torch.arange(24).view(12, 2)  # of queries, keys, values: four each
    cut = _together(rows, 2)
    assert cut[:, 0].tolist() == [0, 2, 8, 10, 16, 18, 4, 6, 12, 14, 20, 22]
    assert torch.equal(_apart(cut, 2), rows)
