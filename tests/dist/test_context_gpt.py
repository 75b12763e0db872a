"""A GPT whose sequences lie over ranks along context, under schemes, against one process."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from gpts import NAMES, Axes, Case, assert_trains_as_one_process, batches, params
from started import runs, sends_the_closed_form

from lowband.cost.contents import step_bytes
from lowband.errors import UserError
from lowband.predict.context import context_sent
from lowband.predict.workload import workload_of
from lowband.run.count_fake import count
from lowband.spec.model import ModelSpec
from lowband.spec.records import by_row
from lowband.spec.run import RunSpec
from tests.checkout import CONFIG

LEARNED = ModelSpec(name="small", layers=2, hidden=32, heads=4, vocab=64, seq_len=16, source="none")
ROTARY = LEARNED.model_copy(update={"positions": "rotary", "tied_head": True})
LINEAR = LEARNED.model_copy(update={"attention": "linear"})
HYBRID = ROTARY.model_copy(update={"attention": "linear", "softmax_every": 2})
TOKENS = 15


def _batches(data_ranks: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs and targets, [steps, micro-batches, data ranks, sequences, tokens]; most targets are masked."""
    generator = torch.Generator().manual_seed(2)
    tokens, targets = batches(data_ranks, TOKENS)
    targets = targets.clone()
    targets[torch.rand(targets.shape, generator=generator) < 0.6] = -100
    targets[0, 0, 0, :, 4:] = -100  # all of some ranks' tokens
    targets[1, 1] = -100
    targets[1, 1, 0, 0, 7] = 3  # one token of the whole micro-batch counts
    return tokens, targets


TWO = {"package": 2, "node": 4}
MIXED, NEAR = "package=heads,node=ring", "package=gather,node=ring"
TENSOR: Axes = {"context": 2, "tensor": 2}
STATE: Axes = {"context_attention": "state", "zigzag": False}
BESIDE: Axes = {"context_attention": NEAR, "zigzag": False}
CASES: list[Case] = [
    (2, LEARNED, {}, {"context": 2}, "zero3", "depth", "none"),
    (4, ROTARY, TWO, {"context": 4, "context_attention": MIXED}, "hier3-exact", "depth", "full"),
    (4, LEARNED, {"node": 2}, {"context": 2, "context_attention": "heads"}, "zero1", "breadth", "none"),
    (4, ROTARY, {}, TENSOR, "ddp", "depth", "none"),
    (4, LEARNED, {}, {**TENSOR, "sequence_parallel": True, "zigzag": False}, "zero3", "depth", "none"),
    (4, LINEAR, {"node": 2}, {"context": 4, **STATE}, "zero3", "depth", "full"),
    (4, HYBRID, TWO, {"context": 4, **BESIDE, "context_states": "scan"}, "hier3-exact", "breadth", "none"),
    (4, HYBRID, {}, {**TENSOR, "zigzag": False, "context_states": "gather"}, "zero1", "depth", "full"),
    (8, LEARNED, TWO, {"context": 4, "context_attention": NEAR}, "hier3-exact", "breadth", "full"),
    (8, LINEAR, {}, {**TENSOR, "context": 4, **STATE, "context_states": "pass"}, "zero3", "depth", "none"),
    (8, ROTARY, TWO, {**TENSOR, "context_attention": "gather"}, "hpz", "depth", "none"),
]  # fmt: skip


@pytest.mark.parametrize(NAMES, params(CASES, wide=(2, 3, 7)))
def test_trains_as_one_process(
    ranks: int, spec: ModelSpec, inner: dict[str, int], axes: Axes, scheme: str, order: str, recompute: str
) -> None:
    assert_trains_as_one_process(ranks, spec, inner, axes, scheme, order, recompute, _batches)


@pytest.mark.wide
@pytest.mark.parametrize("states", [None, "gather", "scan"])
def test_bytes_at_64_ranks_are_the_closed_form(states: str | None) -> None:
    """On fake tensors: the engine's own exchanges, at their true sizes."""
    [smoke] = [spec for spec in CONFIG.runs(["smoke"]) if "hier3-exact-n0004" in spec.run_id]
    more: dict[str, Any] = {
        "ranks": 64,
        "context": 16,
        "tensor": 2,
        "seq_len": 64,
        "device": "fake",
        "accumulation": 2,
    }
    way = "package=heads,node=heads,world=ring"
    machine = {**smoke.machine.model_dump(), "name": "fake"}
    if states is not None:
        more = {**more, "model": HYBRID_RUN, "context_states": states, "zigzag": False}
    spec = RunSpec.parse({**smoke.model_dump(), **more, "context_attention": way, "machine": machine}, "test")
    counted = by_row(count(spec).sent)
    assert counted == step_bytes(spec)
    over_world = {name for level, name, _ in counted if level == "world"}
    assert over_world >= {"context_ring", "tokens_count", *([f"context_state_{states}"] if states else [])}


LINEAR_RUN = CONFIG.model("gpt-200k").model_copy(update={"attention": "linear"})
HYBRID_RUN = LINEAR_RUN.model_copy(update={"softmax_every": 3})
REFUSED = [
    ({"seq_len": 36, "context": 4}, "36 tokens cannot be divided (allowed: multiples of 8)"),
    ({"context": 8}, "4 ranks along data are no multiple of context 8"),
    ({"context": 3}, "4 ranks along data are no multiple of context 3"),
    (
        {"context": 4, "tensor": 2, "ranks": 8, "context_attention": "heads"},
        "2 heads cannot be divided over 4",
    ),
    ({"context": 2, "context_attention": "way"}, "unknown way 'way' (allowed: heads, gather, ring, state)"),
    ({"context": 2, **STATE}, "context_attention state: softmax has no state: it needs every key"),
    ({"context": 2, **STATE, "zigzag": True}, "zigzag gives a rank tokens of both ends of a sequence"),
    (
        {"context": 2, "zigzag": False, "context_states": "scan"},
        "no linear layers, whose states would travel",
    ),
    (
        {"context": 2, "model": LINEAR_RUN},
        "context_attention ring: is for keys and values, and linear layers",
    ),
    (
        {"context": 2, "model": LINEAR_RUN, "context_attention": "heads"},
        "context_attention heads: is for keys",
    ),
    ({"context": 2, "model": HYBRID_RUN, **STATE}, "softmax has no state: it needs every key"),
    (
        {"context": 2, "model": HYBRID_RUN, "context_states": "pass"},
        "zigzag gives a rank tokens of both ends",
    ),
    ({"model": LINEAR_RUN, "attention": "flash2"}, "flash2 is of softmax, and model 'gpt-200k' has none"),
    (
        {"context": 2, "model": LINEAR_RUN, **STATE, "context_states": "pass", "device": "fake"},
        "the last rank passes no state on, and one is counted for all (allowed: context_states gather, scan)",
    ),
    ({"context": 4, "device": "fake"}, "in a ring over several levels"),
    ({"context": 2, "engine": "fsdp2"}, "its only axis is data"),
    ({"context": 4, "scheme": CONFIG.scheme("local-sgd"), "steps": 16, "ranks": 8}, ""),
]


@pytest.mark.parametrize(("changes", "line"), REFUSED)
def test_runs_that_cannot_be_are_refused(changes: dict[str, Any], line: str) -> None:
    [smoke] = [spec for spec in CONFIG.runs(["smoke"]) if "hier3-exact-n0004" in spec.run_id]
    values = {**smoke.model_dump(), **changes}
    if not line:  # a replica is a node, in which there are 4 ranks
        RunSpec.parse(values, "test")
        values, line = {**values, "context": 8}, "context 8 crosses replicas, the groups of level 'node'"
    with pytest.raises(UserError, match=re.escape(line)):
        RunSpec.parse(values, "test")


def test_a_run_without_context_has_the_specification_that_it_had() -> None:
    """So the sums by which runs and points are known stay."""
    [smoke] = [spec for spec in CONFIG.runs(["smoke"]) if "hier3-exact-n0004" in spec.run_id]
    assert not {"context", "context_attention", "zigzag"} & set(smoke.model_dump())
    assert not {"context", "context_attention", "zigzag"} & set(smoke.point)


def test_runs_have_the_losses_and_bytes_of_their_closed_forms(tmp_path: Path) -> None:
    mixed = "package=gather,node=ring"
    found, losses = runs(tmp_path, {
        "data": {"ranks": 2, "micro_batch": 4},
        "heads": {"ranks": 4, "micro_batch": 4, "context": 2, "context_attention": "heads"},
        "mixed": {
            "ranks": 4, "micro_batch": 4, "accumulation": 2, "context": 4, "context_attention": mixed,
            "recompute": "full", "compute_dtype": "bf16",
        },
        "ring": {"ranks": 4, "micro_batch": 8, "context": 2, "tensor": 2, "accumulation": 1},
    })  # fmt: skip
    assert losses["heads"] == pytest.approx(losses["data"], rel=1e-5)
    assert losses["ring"] == pytest.approx(losses["data"], rel=1e-5)
    assert losses["mixed"] == pytest.approx(losses["data"], rel=1e-2)  # in bf16
    for name in ("heads", "mixed", "ring"):
        sends_the_closed_form(found[name])
        spec = RunSpec.read_json(found[name].spec)
        assert {step.tokens for step in found[name].read_steps()} == {8 * spec.seq_len}


def test_runs_of_linear_layers_have_the_losses_and_bytes_of_their_closed_forms(tmp_path: Path) -> None:
    along = {"ranks": 4, "context": 4, "zigzag": False, "accumulation": 2}
    near = {"context_attention": "package=gather,node=ring"}
    of_axes = {
        "linear": {"ranks": 2, "model": LINEAR_RUN},
        "pass": {**along, "model": LINEAR_RUN, "context_attention": "state", "context_states": "pass"},
        "hybrid": {"ranks": 2, "model": HYBRID_RUN},
        "gather": {**along, "model": HYBRID_RUN, **near, "context_states": "gather"},
        "scan": {
            **along,
            "accumulation": 1,
            "micro_batch": 8,
            "model": LINEAR_RUN,
            "context_attention": "state",
            "recompute": "full",
        },
    }
    found, losses = runs(tmp_path, of_axes, micro_batch=4)
    assert losses["pass"] == pytest.approx(losses["linear"], rel=1e-5)
    assert losses["scan"] == pytest.approx(losses["linear"], rel=1e-5)
    assert losses["gather"] == pytest.approx(losses["hybrid"], rel=1e-5)
    for name in ("pass", "scan", "gather"):
        sends_the_closed_form(found[name])
        spec = RunSpec.read_json(found[name].spec)
        for step in [*found[name].read_steps()][1:]:
            sent = by_row(step.sent)
            assert any(row == f"context_state_{name}" for _, row, _ in sent)
            along_context = {key: n for key, n in sent.items() if key[1].startswith(("context", "tokens"))}
            assert along_context == context_sent(workload_of(spec))  # as the predictor has them
