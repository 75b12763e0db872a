"""A GPT whose sequences lie over ranks along context, under schemes, against one process that trains it whole."""

import contextlib
from pathlib import Path

import pytest
import torch

import lowband
from lowband.model.gpt import GPT
from lowband.model.gpt import on_ranks as on_job
from lowband.run.on_ranks import on_ranks
from lowband.spec.config import Config
from lowband.spec.model import ModelSpec

LEARNED = ModelSpec(name="small", layers=2, hidden=32, heads=4, vocab=64, seq_len=16, source="none")
ROTARY = LEARNED.model_copy(update={"positions": "rotary", "tied_head": True})
ROOT = Path(__file__).parents[2]
STEPS, MICRO_BATCHES, CLIP, ROWS, TOKENS = 3, 2, 0.5, 2, 15
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
CASES: list[tuple[int, ModelSpec, dict[str, int], AXES, str, str, str]] = [
    (2, LEARNED, {}, {"context": 2}, "zero3", "depth", "none"),
    (4, ROTARY, TWO, {"context": 4, "context_attention": MIXED}, "hier3", "depth", "full"),
    (4, LEARNED, {"node": 2}, {"context": 2, "context_attention": "heads"}, "zero1", "breadth", "none"),
    (4, ROTARY, {}, TENSOR, "ddp", "depth", "none"),
    (4, LEARNED, {}, {**TENSOR, "sequence_parallel": True, "zigzag": False}, "zero3", "depth", "none"),
    (8, LEARNED, TWO, {"context": 4, "context_attention": NEAR}, "hier3", "breadth", "full"),
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
