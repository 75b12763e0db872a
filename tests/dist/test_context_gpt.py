"""A GPT whose sequences lie over ranks along context, under schemes, against one process."""

import contextlib
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from started import run

import lowband
from lowband.cost.contents import step_bytes
from lowband.errors import UserError
from lowband.model.gpt import GPT
from lowband.model.gpt import on_ranks as on_job
from lowband.predict.context import context_sent
from lowband.predict.workload import workload_of
from lowband.run.count_fake import count
from lowband.run.on_ranks import on_ranks
from lowband.spec.config import Config
from lowband.spec.model import ModelSpec
from lowband.spec.run import RunSpec

LEARNED = ModelSpec(name="small", layers=2, hidden=32, heads=4, vocab=64, seq_len=16, source="none")
ROTARY = LEARNED.model_copy(update={"positions": "rotary", "tied_head": True})
LINEAR = LEARNED.model_copy(update={"attention": "linear"})
HYBRID = ROTARY.model_copy(update={"attention": "linear", "softmax_every": 2})
ROOT = Path(__file__).parents[2]
STEPS, MICRO_BATCHES, CLIP, ROWS, TOKENS = 2, 2, 0.5, 2, 15
AXES = dict[str, int | str | bool]


def _batches(data_ranks: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs and targets, [steps, micro-batches, data ranks, sequences, tokens]; most targets are masked."""
    generator = torch.Generator().manual_seed(1)
    shape = STEPS, MICRO_BATCHES, data_ranks, ROWS, TOKENS + 1
    tokens = torch.randint(64, shape, generator=generator)
    targets = tokens[..., 1:].clone()
    targets[torch.rand(targets.shape, generator=generator) < 0.6] = -100
    targets[0, 0, 0, :, 4:] = -100  # all of some ranks' tokens
    targets[1, 1] = -100
    targets[1, 1, 0, 0, 7] = 3  # one token of the whole micro-batch counts
    return tokens[..., :-1], targets


def _alone(spec: ModelSpec, data_ranks: int) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses and norms before clipping, and the final weights, of one process."""
    model = GPT(spec, seed=3)
    optimizer, found = torch.optim.SGD(model.parameters(), lr=1.0), []
    for inputs, targets in zip(*_batches(data_ranks), strict=True):
        for x, y in zip(inputs, targets, strict=True):
            loss = model(x.flatten(0, 1), y.flatten(0, 1)) / MICRO_BATCHES
            loss.backward()
            found.append(loss.item())
        found.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)))
        optimizer.step()
        optimizer.zero_grad()
    return found, model.state_dict()


def _trained(
    spec: ModelSpec, inner: dict[str, int], axes: AXES, scheme: str, order: str, recompute: str
) -> tuple[list[float], dict[str, torch.Tensor]]:
    topology = lowband.Topology(inner, lowband.Axes(**axes))  # type: ignore[arg-type]
    data = topology.along("data")
    place = data.place // topology.axes.context
    with torch.device("meta"):
        model = GPT(spec, recompute=recompute)  # type: ignore[arg-type]
    on_job(model, Config().scheme(scheme), topology, compute_dtype=torch.float32, seed=3, device="cpu")
    optimizer, found = torch.optim.SGD(model.parameters(), lr=1.0), []
    for inputs, targets in zip(*_batches(len(data.ranks) // topology.axes.context), strict=True):
        micro_batches = [*zip(inputs[:, place], targets[:, place], strict=True)]

        def loss_of(micro_batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
            return model(*micro_batch) / MICRO_BATCHES  # type: ignore[no-any-return]

        if order == "breadth":
            losses = lowband.accumulate(model, micro_batches, loss_of)
        else:
            losses = []
            for i, micro_batch in enumerate(micro_batches):
                with lowband.no_sync(model) if i < MICRO_BATCHES - 1 else contextlib.nullcontext():
                    losses.append(loss_of(micro_batch))
                    losses[-1].backward()
        means = torch.stack([loss.detach() for loss in losses])
        torch.distributed.all_reduce(means)
        found += (means / torch.distributed.get_world_size()).tolist()
        found.append(float(lowband.clip_grad_norm_(model, CLIP)))
        optimizer.step()
        optimizer.zero_grad()
    return found, lowband.full_state_dict(model)


TWO = {"package": 2, "node": 4}
MIXED, NEAR = "package=heads,node=ring", "package=gather,node=ring"
TENSOR: AXES = {"context": 2, "tensor": 2}
STATE: AXES = {"context_attention": "state", "zigzag": False}
BESIDE: AXES = {"context_attention": NEAR, "zigzag": False}
CASES: list[tuple[int, ModelSpec, dict[str, int], AXES, str, str, str]] = [
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


@pytest.mark.parametrize(
    ("ranks", "spec", "inner", "axes", "scheme", "order", "recompute"),
    [pytest.param(*case, marks=[pytest.mark.wide] if case[0] > 4 else []) for case in CASES],
)
def test_trains_as_one_process(
    ranks: int, spec: ModelSpec, inner: dict[str, int], axes: AXES, scheme: str, order: str, recompute: str
) -> None:
    data_ranks = ranks // int(axes["context"]) // int(axes.get("tensor", 1))
    [(expected, weights)] = on_ranks(1, _alone, spec, data_ranks)
    found = on_ranks(ranks, _trained, spec, inner, axes, scheme, order, recompute)
    for theirs, _ in found:
        assert theirs == pytest.approx(expected, rel=2e-6)
    state = found[0][1]
    assert list(state) == list(weights)
    for name, value in weights.items():
        torch.testing.assert_close(state[name], value, rtol=1e-5, atol=2e-6)


@pytest.mark.wide
@pytest.mark.parametrize("states", [None, "gather", "scan"])
def test_bytes_at_64_ranks_are_the_closed_form(states: str | None) -> None:
    """On fake tensors: the engine's own exchanges, at their true sizes."""
    [smoke] = [spec for spec in Config(ROOT).runs(["smoke"]) if "hier3-exact-n0004" in spec.run_id]
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
    counted = {(sent.level, sent.collective, sent.wire): sent.bytes for sent in count(spec).sent}
    assert counted == step_bytes(spec)
    over_world = {name for level, name, _ in counted if level == "world"}
    assert over_world >= {"context_ring", "tokens_count", *([f"context_state_{states}"] if states else [])}


LINEAR_RUN = Config(ROOT).model("gpt-200k").model_copy(update={"attention": "linear"})
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
    ({"context": 4, "scheme": Config(ROOT).scheme("local-sgd"), "steps": 16, "ranks": 8}, ""),
]


@pytest.mark.parametrize(("changes", "line"), REFUSED)
def test_runs_that_cannot_be_are_refused(changes: dict[str, Any], line: str) -> None:
    [smoke] = [spec for spec in Config(ROOT).runs(["smoke"]) if "hier3-exact-n0004" in spec.run_id]
    values = {**smoke.model_dump(), **changes}
    if not line:  # a replica is a node, in which there are 4 ranks
        RunSpec.parse(values, "test")
        values, line = {**values, "context": 8}, "context 8 crosses replicas, the groups of level 'node'"
    with pytest.raises(UserError, match=re.escape(line)):
        RunSpec.parse(values, "test")


def test_a_run_without_context_has_the_specification_that_it_had() -> None:
    """So the sums by which runs and points are known stay."""
    [smoke] = [spec for spec in Config(ROOT).runs(["smoke"]) if "hier3-exact-n0004" in spec.run_id]
    assert not {"context", "context_attention", "zigzag"} & set(smoke.model_dump())
    assert not {"context", "context_attention", "zigzag"} & set(smoke.point)


def test_runs_have_the_losses_and_bytes_of_their_closed_forms(tmp_path: Path) -> None:
    changes = {"steps": 3, "fingerprint": False, "scheme": Config(ROOT).scheme("zero3")}
    mixed = "package=gather,node=ring"
    found = {}
    for name, axes in {
        "data": {"ranks": 2, "micro_batch": 4},
        "heads": {"ranks": 4, "micro_batch": 4, "context": 2, "context_attention": "heads"},
        "mixed": {
            "ranks": 4, "micro_batch": 4, "accumulation": 2, "context": 4, "context_attention": mixed,
            "recompute": "full", "compute_dtype": "bf16",
        },
        "ring": {"ranks": 4, "micro_batch": 8, "context": 2, "tensor": 2, "accumulation": 1},
    }.items():  # fmt: skip
        found[name] = run(tmp_path / name, **changes, **axes)
    losses = {name: [step.loss for step in folder.read_steps()] for name, folder in found.items()}
    assert losses["heads"] == pytest.approx(losses["data"], rel=1e-5)
    assert losses["ring"] == pytest.approx(losses["data"], rel=1e-5)
    assert losses["mixed"] == pytest.approx(losses["data"], rel=1e-2)  # in bf16
    for name in ("heads", "mixed", "ring"):
        spec = RunSpec.read_json(found[name].spec)
        for step in [*found[name].read_steps()][1:]:  # the first one has no new weights to fetch
            assert {(s.level, s.collective, s.wire): s.bytes for s in step.sent} == step_bytes(spec)
            assert step.tokens == 8 * spec.seq_len


def test_runs_of_linear_layers_have_the_losses_and_bytes_of_their_closed_forms(tmp_path: Path) -> None:
    changes = {"steps": 3, "fingerprint": False, "scheme": Config(ROOT).scheme("zero3"), "micro_batch": 4}
    along = {"ranks": 4, "context": 4, "zigzag": False, "accumulation": 2}
    near = {"context_attention": "package=gather,node=ring"}
    found = {}
    for name, axes in {
        "linear": {"ranks": 2, "model": LINEAR_RUN},
        "pass": {**along, "model": LINEAR_RUN, "context_attention": "state", "context_states": "pass"},
        "hybrid": {"ranks": 2, "model": HYBRID_RUN},
        "gather": {**along, "model": HYBRID_RUN, **near, "context_states": "gather"},
        "scan": {
            **along,
            "ranks": 8,
            "context": 8,
            "accumulation": 1,
            "micro_batch": 8,
            "model": LINEAR_RUN,
            "context_attention": "state",
            "recompute": "full",
        },
    }.items():
        found[name] = run(tmp_path / name, **changes | axes)
    losses = {name: [step.loss for step in folder.read_steps()] for name, folder in found.items()}
    assert losses["pass"] == pytest.approx(losses["linear"], rel=1e-5)
    assert losses["scan"] == pytest.approx(losses["linear"], rel=1e-5)
    assert losses["gather"] == pytest.approx(losses["hybrid"], rel=1e-5)
    for name in ("pass", "scan", "gather"):
        spec = RunSpec.read_json(found[name].spec)
        for step in [*found[name].read_steps()][1:]:  # the first one has no new weights to fetch
            sent = {(s.level, s.collective, s.wire): s.bytes for s in step.sent}
            assert sent == step_bytes(spec)
            assert any(row == f"context_state_{name}" for _, row, _ in sent)
            along_context = {key: n for key, n in sent.items() if key[1].startswith(("context", "tokens"))}
            assert along_context == context_sent(workload_of(spec))  # as the predictor has them
