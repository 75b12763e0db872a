"""Checkpoints of pipelines: saved by one division of the ranks and read by another one."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from checkpoints import goes_on
from near import assert_near
from safetensors.torch import load_file
from started import goes_on_with_the_same_bits
from test_run_stages import BASE, MODEL, TIED

import lowband
from lowband.engine.checkpoint.manifest import Manifest
from lowband.model.gpt import GPT
from lowband.model.gpt import on_ranks as on_job
from lowband.run.on_ranks import on_ranks
from lowband.spec.model import ModelSpec
from lowband.spec.schedules import SCHEDULES
from tests.checkout import CONFIG
from tests.refused import refusal

STEPS, BATCHES, CLIP = 2, 4, 0.1
Axes = dict[str, int]
Found = tuple[list[float], dict[str, torch.Tensor]]


def batches() -> torch.Tensor:
    """[steps, micro-batches of all data ranks, sequences, tokens]"""
    return torch.randint(256, (STEPS, BATCHES, 2, 17), generator=torch.Generator().manual_seed(1))


def made(
    axes: Axes, schedule: str, spec: ModelSpec = MODEL, layers: Sequence[int] = ()
) -> tuple[torch.nn.Module, GPT, lowband.Topology, int]:
    """A GPT on the job's ranks, the GPT that it was made of, and the micro-batches of each."""
    topology = lowband.Topology({}, lowband.Axes(**axes))
    each = BATCHES // len(topology.along("data").ranks) * topology.axes.context
    with torch.device("meta"):
        model = GPT(spec)
    of_step = each, schedule, SCHEDULES[schedule].chunks[0], layers
    options: dict[str, Any] = {"compute_dtype": torch.float32, "seed": 3, "device": "cpu"}
    return on_job(model, CONFIG.scheme("zero3"), topology, *of_step, **options), model, topology, each


def mean_loss(model: torch.nn.Module, gpt: GPT, mine: torch.Tensor, copies: int) -> float:
    """Of a step, forward and backward. copies: ranks with the last stage"""
    pairs = [(batch[:, :-1], batch[:, 1:]) for batch in mine]
    if isinstance(model, lowband.Pipeline):
        losses = model.step([gpt.split(*pair) for pair in pairs])
    else:
        losses = lowband.accumulate(model, pairs, lambda pair: model(*pair) / len(pairs))
    total = sum(losses, torch.zeros(()))
    everyones = [torch.zeros(()) for _ in range(dist.get_world_size())]
    dist.all_gather(everyones, total)
    return float(torch.stack(everyones).sum()) / copies


def trained(
    folder: Path,
    axes: Axes,
    first: int,
    schedule: str = "1f1b",
    spec: ModelSpec = MODEL,
    layers: Sequence[int] = (),
) -> Found:
    """Losses from step `first` on, and this rank's weights at the end; the state is saved after step 0."""
    model, gpt, topology, each = made(axes, schedule, spec, layers)
    data = topology.along("data")
    place = data.place // topology.axes.context

    def loss_of(step: torch.Tensor) -> float:
        mine = step[place * each : (place + 1) * each]
        return mean_loss(model, gpt, mine, len(data.ranks) * axes.get("tensor", 1))

    return goes_on(folder, model, first, batches(), loss_of, CLIP)


def by_name(found: list[Found]) -> dict[str, torch.Tensor]:
    """Weights of all ranks."""
    return dict(sorted((name, value) for _, state in found for name, value in state.items()))


def saved_and_read(
    folder: Path, ranks: int, axes: Axes, schedule: str, then: Axes, their_schedule: str, error: float,
    spec: ModelSpec = MODEL,
) -> tuple[Manifest, dict[str, torch.Tensor]]:  # fmt: skip
    """What ranks save, others read, or one without any stages, and go on alike: the manifest, the weights."""
    saved = on_ranks(ranks, trained, folder, axes, 0, schedule, spec)
    manifest = Manifest.read(next(folder.iterdir()))
    again = on_ranks(ranks if then else 1, trained, folder, then, 1, their_schedule, spec)
    assert {tuple(losses) for losses, _ in saved} == {tuple(saved[0][0])}
    assert again[0][0] == pytest.approx(saved[0][0][1:], rel=error, abs=0)
    weights = by_name(saved)
    assert_near(by_name(again), weights, rtol=10 * error, atol=2 * error)
    return manifest, weights


CASES = [
    (2, {"pipeline": 2}, "zb-v", {"pipeline": 2}, "zb-v", 0),
    (4, {"pipeline": 2, "tensor": 2}, "1f1b", {"pipeline": 4}, "1f1b", 1e-5),
    pytest.param(4, {"pipeline": 2}, "zb-v", {"pipeline": 2}, "1f1b", 0, marks=pytest.mark.wide),
    pytest.param(4, {"pipeline": 2}, "1f1b", {}, "1f1b", 1e-5, marks=pytest.mark.wide),
    (4, {"pipeline": 2, "context": 2}, "1f1b", {"context": 4}, "1f1b", 1e-5),
    pytest.param(
        8, {"pipeline": 2, "tensor": 2}, "1f1b", {"pipeline": 4}, "gpipe", 1e-5, marks=pytest.mark.wide
    ),
]


@pytest.mark.parametrize(("ranks", "axes", "schedule", "then", "their_schedule", "error"), CASES)
def test_a_checkpoint_is_read_under_any_stages(
    tmp_path: Path, ranks: int, axes: Axes, schedule: str, then: Axes, their_schedule: str, error: float
) -> None:
    job = ranks, axes, schedule, then, their_schedule, error
    manifest, weights = saved_and_read(tmp_path, *job)
    names = dict(GPT(MODEL).named_parameters())
    assert {
        name.removeprefix("model.") for name in manifest.firsts if name.startswith("model.")
    } == names.keys()
    assert weights.keys() == names.keys()


def test_one_ranks_checkpoint_is_read_by_stages(tmp_path: Path) -> None:
    [(losses, weights)] = on_ranks(1, trained, tmp_path, {}, 0)
    again = on_ranks(2, trained, tmp_path, {"pipeline": 2}, 1)
    assert again[0][0] == pytest.approx(losses[1:], rel=1e-5)
    assert_near(by_name(again), dict(sorted(weights.items())), rtol=1e-4, atol=2e-5)


TIED_CASES = [
    (4, {"pipeline": 2}, "1f1b", {"pipeline": 4}, "gpipe", 1e-5),
    pytest.param(4, {"pipeline": 4}, "1f1b", {}, "1f1b", 1e-5, marks=pytest.mark.wide),
    (4, {"pipeline": 2, "tensor": 2}, "zb-h1", {"pipeline": 2}, "zb-v", 1e-5),
]


@pytest.mark.parametrize(("ranks", "axes", "schedule", "then", "their_schedule", "error"), TIED_CASES)
def test_a_head_that_is_the_embedding_is_saved_once(
    tmp_path: Path, ranks: int, axes: Axes, schedule: str, then: Axes, their_schedule: str, error: float
) -> None:
    """Whether stages on two ranks have it or not."""
    job = ranks, axes, schedule, then, their_schedule, error
    manifest, weights = saved_and_read(tmp_path, *job, TIED)
    assert "model.embed.weight" in manifest.firsts
    assert "model.head.weight" not in manifest.tensors
    assert sum(group.parameters.count("embed.weight") for group in manifest.groups) == 1
    assert weights.keys() == GPT(TIED).state_dict().keys()
    assert torch.equal(weights["embed.weight"], weights["head.weight"])


def exported(folder: Path, schedule: str, spec: ModelSpec) -> None:
    lowband.save_safetensors(made({"pipeline": 2, "tensor": 2}, schedule, spec)[0], folder)


@pytest.mark.parametrize(("schedule", "spec"), [("zb-v", MODEL), ("1f1b", TIED)], ids=["two", "tied"])
def test_safetensors_have_the_whole_model(tmp_path: Path, schedule: str, spec: ModelSpec) -> None:
    on_ranks(4, exported, tmp_path, schedule, spec)
    files = [load_file(path) for path in sorted(tmp_path.glob("*.safetensors"))]
    found = {name: value for file in files for name, value in file.items()}
    expected = GPT(spec, seed=3).state_dict()
    if spec.tied_head:
        expected.pop("head.weight")  # as of a module on one rank: under its first name
    assert found.keys() == expected.keys()
    assert all(torch.equal(expected[name], value) for name, value in found.items())
    again = lowband.Safetensors(tmp_path)
    with again.flat("blocks.3.mlp.up.bias", torch.Size([4 * MODEL.hidden])) as flat:
        assert torch.equal(flat[0:8], expected["blocks.3.mlp.up.bias"][:8])


class Biased(torch.nn.Module):
    """A head with the embedding's weight alone, and a buffer, as BART's."""

    def __init__(self, embed: torch.nn.Embedding) -> None:
        super().__init__()
        self.out = torch.nn.Linear(*embed.weight.T.shape, bias=False)
        self.out.weight = embed.weight
        self.register_buffer("final_logits_bias", torch.arange(float(len(embed.weight))))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(x) + self.final_logits_bias


def exported_with_buffers(folder: Path, layers: list[int]) -> set[str]:
    embed = torch.nn.Embedding(11, 8)
    modules = [embed, torch.nn.Linear(8, 8), torch.nn.Linear(8, 8), Biased(embed)]
    topology = lowband.Topology({}, lowband.Axes(pipeline=2))
    pipe = lowband.Pipeline(modules, torch.nn.functional.cross_entropy, "zero3", topology, 1, layers=layers)
    lowband.save_safetensors(pipe, folder)
    return set(lowband.full_state_dict(pipe))


@pytest.mark.parametrize("layers", [[2, 2], [3, 1]])
def test_safetensors_have_the_buffers_of_a_stage_without_parameters_of_its_own(
    tmp_path: Path, layers: list[int]
) -> None:
    first, second = on_ranks(2, exported_with_buffers, tmp_path, layers)
    found = {name for path in tmp_path.glob("*.safetensors") for name in load_file(path)}
    assert found == (first | second) - {"3.out.weight"}  # of two names the first
    assert "3.final_logits_bias" in found
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"]) == found


def differing(folder: Path) -> str:
    model, _, topology, _ = made({"pipeline": 2}, "1f1b")
    rate = 1e-2 if topology.along("pipeline").place else 1e-3
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    return refusal(lambda: lowband.Checkpointer(folder).save(1, model, optimizer))


def test_stages_that_differ_are_refused(tmp_path: Path) -> None:
    for text in on_ranks(2, differing, tmp_path / "new"):
        assert "stages of a pipeline save different steps, optimizers or param groups" in text
    assert not (tmp_path / "new").exists()


def test_an_interrupted_run_goes_on_with_the_same_bits(tmp_path: Path) -> None:
    goes_on_with_the_same_bits(tmp_path / "run", **BASE, ranks=4, pipeline=2, scheme=CONFIG.scheme("zero3"))


def named_and_not(folder: Path) -> list[list[Any]]:
    """Of optimizers with and without names, after a checkpoint of the others: lr, names, the model's."""
    found = []
    for step, (saves, loads) in enumerate(
        (("named_parameters", "parameters"), ("parameters", "named_parameters"))
    ):
        optimizers = []
        for kind in (saves, loads):
            model, *_ = made({"pipeline": 2}, "1f1b")
            optimizers.append(
                (model, torch.optim.AdamW(getattr(model, kind)(), lr=0.5 if kind == saves else 0.1))
            )
        checkpointer = lowband.Checkpointer(folder / str(step))
        checkpointer.save(step, *optimizers[0])
        checkpointer.load_newest(*optimizers[1])
        [group] = optimizers[1][1].param_groups
        names = [name for name, _ in optimizers[1][0].named_parameters()]
        found.append([group["lr"], group.get("param_names"), names])
    return found


def test_names_of_an_optimizers_parameters_are_its_own(tmp_path: Path) -> None:
    """Stages have different ones."""
    for plain, named in on_ranks(2, named_and_not, tmp_path):
        assert plain[:2] == [0.5, None]
        assert named[:2] == [0.5, named[2]]
