"""Tensor ranks beside a data axis with schemes on it, against one process that trains the whole model."""

import contextlib
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from checkpoints import goes_on
from gpts import CLIP, Axes, assert_trains_as_one_process, batches, made, trained
from near import assert_near
from safetensors.torch import load_file
from started import runs, sends_the_closed_form
from torch import nn

import lowband
from lowband.model.gpt import GPT, Block
from lowband.model.gpt import on_ranks as on_job
from lowband.run.on_ranks import on_ranks
from lowband.spec.model import ModelSpec
from lowband.spec.tensor import gpt_plan
from tests.checkout import CONFIG
from tests.refused import refusal

SPEC = ModelSpec(name="small", layers=2, hidden=32, heads=4, vocab=64, seq_len=16, source="none")


CASES = [
    (4, {}, {"tensor": 2}, "zero3", "depth"),
    (4, {}, {"tensor": 2, "sequence_parallel": True}, "ddp", "breadth"),
    (8, {"package": 2, "node": 4}, {"tensor": 2, "sequence_parallel": True}, "hpz", "depth"),
    (8, {"node": 2}, {"tensor": 4}, "zero1", "depth"),
    (2, {}, {"tensor": 2}, "zero3", "breadth"),
    (8, {"package": 2, "node": 4}, {"tensor": 2}, "hsdp", "breadth"),
    (8, {"package": 2, "node": 4}, {"tensor": 4, "sequence_parallel": True}, "zero2", "depth"),
]


@pytest.mark.parametrize(
    ("ranks", "inner", "axes", "scheme", "order"),
    [pytest.param(*case, marks=[pytest.mark.wide] if i > 3 else []) for i, case in enumerate(CASES)],
)
def test_trains_as_one_process(
    ranks: int, inner: dict[str, int], axes: Axes, scheme: str, order: str
) -> None:
    assert_trains_as_one_process(ranks, SPEC, inner, axes, scheme, order, "none")


@pytest.mark.parametrize("sequence", [False, pytest.param(True, marks=pytest.mark.wide)])
def test_schemes_give_the_same_bits(sequence: bool) -> None:
    axes: Axes = {"tensor": 2, "sequence_parallel": sequence}
    runs = [
        on_ranks(4, trained, SPEC, batches, {}, axes, scheme, "breadth")[0]
        for scheme in ("ddp", "zero1", "zero3")
    ]
    for norms, weights in runs[1:]:
        assert norms == runs[0][0]
        assert all(torch.equal(weights[name], value) for name, value in runs[0][1].items())


def _by_units(wrap: type[nn.Module] | tuple[type[nn.Module], ...]) -> dict[str, torch.Tensor]:
    topology = lowband.Topology({}, lowband.Axes(tensor=2, sequence_parallel=True))
    model = lowband.parallelize(GPT(SPEC, seed=3), gpt_plan(SPEC), topology)
    lowband.shard(model, CONFIG.scheme("ddp"), topology, wrap, torch.float32)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    for inputs, targets in zip(*batches(1), strict=True):
        model(inputs[0, 0], targets[0, 0]).backward()
        optimizer.step()
        optimizer.zero_grad()
    return lowband.full_state_dict(model)


def test_a_bucket_of_units_with_partial_sums_and_without() -> None:
    """Of one layer each: norms and biases of Rows see a part of the tokens, Columns do not."""
    blocks, layers = (on_ranks(4, _by_units, wrap)[0] for wrap in (Block, (nn.Linear, nn.LayerNorm)))
    assert layers.keys() == blocks.keys()
    assert all(torch.equal(layers[name], value) for name, value in blocks.items())


def _saved_and_continued(folder: Path, axes: Axes, first: int) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses of steps from `first` on, after step 0 was saved by another division; saves it if first is 0."""
    topology = lowband.Topology({}, lowband.Axes(**axes))
    data = topology.along("data")
    model = made(SPEC, topology, "zero3")

    def loss_of(step: tuple[torch.Tensor, torch.Tensor]) -> float:
        inputs, targets = (each.flatten(0, 1).chunk(len(data.ranks))[data.place] for each in step)
        total = torch.zeros(())
        for i, batch in enumerate(zip(inputs, targets, strict=True)):
            with lowband.no_sync(model) if i < len(inputs) - 1 else contextlib.nullcontext():
                loss = model(*batch) / len(inputs)
                loss.backward()
            total += loss.detach()
        everyones = [torch.zeros(()) for _ in range(dist.get_world_size())]
        dist.all_gather(everyones, total)
        return float(torch.stack(everyones).mean())

    return goes_on(folder, model, first, zip(*batches(4), strict=True), loss_of, CLIP)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[float], dict[str, torch.Tensor]]:
    """The folder of a checkpoint of tensor ranks; their losses from its step on, and their last weights."""
    folder = tmp_path_factory.mktemp("saved")
    return folder, *on_ranks(4, _saved_and_continued, folder, {"tensor": 2}, 0)[0]


@pytest.mark.parametrize(
    ("ranks", "axes"),
    [
        (1, {}),
        (4, {"tensor": 4}),
        (2, {"tensor": 2, "sequence_parallel": True}),
        pytest.param(4, {}, marks=pytest.mark.wide),
    ],
)
def test_a_checkpoint_is_read_under_any_division(
    saved: tuple[Path, list[float], dict[str, torch.Tensor]], ranks: int, axes: Axes
) -> None:
    folder, losses, weights = saved
    again, resumed = on_ranks(ranks, _saved_and_continued, folder, axes, 1)[0]
    assert again == pytest.approx(losses[1:], rel=1e-5)
    assert_near(resumed, weights, rtol=1e-4, atol=2e-5)


def _exported(folder: Path) -> bool:
    topology = lowband.Topology({}, lowband.Axes(tensor=2))
    model = made(SPEC, topology, "zero3")
    with torch.device("meta"):
        again = GPT(SPEC)
    lowband.save_safetensors(model, folder)
    lowband.parallelize(again, gpt_plan(SPEC), topology)
    lowband.shard(again, "zero3", topology, Block, init=lowband.Safetensors(folder), device="cpu")
    first, second = lowband.full_state_dict(model), lowband.full_state_dict(again)
    return all(torch.equal(second[name], value) for name, value in first.items())


def test_safetensors_have_whole_weights(tmp_path: Path) -> None:
    assert all(on_ranks(2, _exported, tmp_path))
    found = {
        name: value for path in tmp_path.glob("*.safetensors") for name, value in load_file(path).items()
    }
    expected = GPT(SPEC, seed=3).state_dict()
    assert expected.keys() - found.keys() == {"head.weight"}  # the embedding's
    assert all(torch.equal(expected[name], value) for name, value in found.items())


def _optimizers_refused() -> list[str]:
    topology = lowband.Topology({}, lowband.Axes(tensor=2))
    model = on_job(GPT(SPEC), CONFIG.scheme("zero3"), topology, compute_dtype=torch.float32)
    texts = [refusal(lowband.Matrices, model)]
    model(torch.zeros(1, 16, dtype=torch.long), torch.zeros(1, 16, dtype=torch.long)).backward()
    for kind in (lowband.Lamb, lowband.Adafactor):
        texts.append(refusal(kind(model.parameters(), lr=1e-3).step))
    return texts


def test_optimizers_of_whole_matrices_refuse_slices() -> None:
    for matrices, lamb, adafactor in on_ranks(2, _optimizers_refused):
        assert "is cut over tensor ranks, none of which has the whole matrix" in matrices
        assert "is cut over tensor ranks, whose parts are not summed" in lamb
        assert "is cut over tensor ranks" in adafactor


def test_a_run_along_tensor_has_the_losses_and_bytes_of_its_closed_forms(tmp_path: Path) -> None:
    """With sequence parallelism some ranks have shared gradients in their shards, and others have none."""
    cut = {"ranks": 4, "micro_batch": 4, "tensor": 2, "sequence_parallel": True, "recompute": "full"}
    found, losses = runs(tmp_path, {"data": {"ranks": 2, "micro_batch": 4}, "tensor": cut})
    assert losses["tensor"] == pytest.approx(losses["data"], rel=1e-5)
    sends_the_closed_form(found["tensor"])
