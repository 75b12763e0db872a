"""Checkpoints: resumed under another scheme, rank count and levels; never harmed, never trusted blindly."""

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from test_parity import CLIP, SPEC, part_of_batch
from torch import nn

import lowband
from lowband.cost.bytes import unit_numels
from lowband.cost.checkpoint import all_bytes, rank_bytes, writers
from lowband.engine.checkpoint.manifest import Manifest
from lowband.model.gpt import GPT, Block
from lowband.run.on_ranks import on_ranks
from lowband.spec.mesh import Levels
from tests.checkout import CONFIG


class Clones(torch.optim.Optimizer):
    """Descent along a sum of gradients that begins as a copy of the first, as others' optimizers write it."""

    def __init__(self, parameters) -> None:
        super().__init__(parameters, {"lr": 1e-2})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        [group] = self.param_groups
        for parameter in group["params"]:
            state = self.state[parameter]
            if not state:
                state["first"] = parameter.clone()
                state["sum"] = parameter.grad.clone()
            state["sum"].mul_(0.9).add_(parameter.grad)
            parameter.lerp_(state["first"], 0.1).sub_(state["sum"], alpha=group["lr"])


INNER = {"package": 2, "node": 4}
LAST = 3  # one step behind the checkpoint: it needs the weights and the optimizer's state
OPTIMIZERS = {
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=3e-3, weight_decay=0.1),
    "adagrad": lambda parameters: torch.optim.Adagrad(parameters, lr=1e-2),
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=3e-2, momentum=0.9),
    "clones": Clones,
}


def build(scheme: str, inner: dict[str, int], optimizer: str):
    model = lowband.shard(
        GPT(SPEC, seed=7), CONFIG.scheme(scheme), lowband.Topology(inner), Block, torch.float32
    )
    return model, OPTIMIZERS[optimizer](model.parameters())


def train(model, optimizer, first: int, last: int) -> None:
    for step in range(first, last):
        model(*part_of_batch(step, 0, dist.get_rank(), dist.get_world_size(), 1)).backward()
        lowband.clip_grad_norm_(model, CLIP)
        optimizer.step()
        optimizer.zero_grad()


def save_and_go_on(folder: str, scheme: str, optimizer_name: str):
    model, optimizer = build(scheme, INNER, optimizer_name)
    train(model, optimizer, 0, 2)
    checkpointer = lowband.Checkpointer(Path(folder))
    checkpointer.save(2, model, optimizer, {"next_step": 2})
    train(model, optimizer, 2, LAST)  # while it is written
    checkpointer.wait()
    return lowband.full_state_dict(model), checkpointer.stall_s


def resume(folder: str, scheme: str, inner: dict[str, int], optimizer_name: str):
    model, optimizer = build(scheme, inner, optimizer_name)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(9.0)  # what is not loaded shows
    for group in optimizer.param_groups:
        group["lr"] = 9.0
    checkpointer = lowband.Checkpointer(Path(folder))
    extra = checkpointer.load(checkpointer.latest(), model, optimizer)
    train(model, optimizer, extra["next_step"], LAST)
    return lowband.full_state_dict(model)


# By scheme and optimizer: the folder of a checkpoint, the weights after the steps behind it, the stall.
Saved = Callable[[str, str], tuple[Path, dict[str, torch.Tensor], float]]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Saved:
    @cache
    def by(scheme: str, optimizer: str) -> tuple[Path, dict[str, torch.Tensor], float]:
        folder = tmp_path_factory.mktemp("saved")
        return folder, *on_ranks(8, save_and_go_on, str(folder), scheme, optimizer)[0]

    return by


def there_and_back(folder: str, optimizer: str) -> bool:
    """Whether a model goes on with the same bits."""
    expected, _ = save_and_go_on(folder, "zero3", optimizer)
    got = resume(folder, "zero3", INNER, optimizer)
    return all(torch.equal(got[name], value) for name, value in expected.items())


# States from before the first step, and copies of shards and of their gradients.
@pytest.mark.parametrize("optimizer", ["adagrad", "clones"])
def test_states_that_are_marked_as_parts(tmp_path: Path, optimizer: str) -> None:
    assert on_ranks(1, there_and_back, str(tmp_path), optimizer) == [True]


@pytest.mark.parametrize(
    ("scheme", "optimizer"),
    [
        ("hier3-exact", "adamw"),
        pytest.param("hier3-exact", "sgd", marks=pytest.mark.wide),
        pytest.param("hsdp", "adamw", marks=pytest.mark.wide),
        pytest.param("ddp", "sgd", marks=pytest.mark.wide),
        pytest.param("hsdp", "sgd", marks=pytest.mark.wide),
        pytest.param("ddp", "adamw", marks=pytest.mark.wide),
    ],
)
def test_resume_is_bit_equal_under_the_same_scheme(saved: Saved, scheme: str, optimizer: str) -> None:
    folder, expected, stall_s = saved(scheme, optimizer)
    assert stall_s > 0
    got = on_ranks(8, resume, str(folder), scheme, INNER, optimizer)[0]
    for name, value in expected.items():
        assert torch.equal(got[name], value), name


@pytest.mark.parametrize(
    ("scheme", "ranks", "inner"),
    [
        pytest.param("zero3", 8, INNER, marks=pytest.mark.wide),
        ("hier3-exact", 4, {"package": 2, "node": 2}),
        ("hpz", 2, {"package": 1, "node": 2}),
        ("zero1", 8, {"package": 4, "node": 8}),
        ("ddp", 1, INNER),
    ],
)
def test_resume_under_another_scheme_and_size(saved: Saved, scheme: str, ranks: int, inner) -> None:
    """Sums go in another order, so the bound of test_parity holds: a tenth of the learning rate."""
    folder, expected, _ = saved("hier3-exact", "adamw")
    got = on_ranks(ranks, resume, str(folder), scheme, inner, "adamw")[0]
    for name, value in expected.items():
        assert torch.allclose(got[name], value, rtol=0, atol=3e-4), name


class Normed(nn.Sequential):
    """Running statistics (each rank's own), a step counter, dropout: what parameters alone do not hold."""

    def __init__(self) -> None:
        torch.manual_seed(3)
        super().__init__(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 3))


def build_normed(inner: dict[str, int]):
    model = lowband.shard(Normed(), CONFIG.scheme("zero3"), lowband.Topology(inner), nn.Linear, torch.float32)
    return model, OPTIMIZERS["sgd"](model.parameters())


def train_normed(model, optimizer, first: int, last: int) -> None:
    for step in range(first, last):
        generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
        model(torch.randn(6, 5, generator=generator)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def save_normed_and_go_on(folder: str):
    model, optimizer = build_normed(INNER)
    torch.manual_seed(dist.get_rank())
    train_normed(model, optimizer, 0, 2)
    at_save = {name: buffer.clone() for name, buffer in model.named_buffers()}
    checkpointer = lowband.Checkpointer(Path(folder))
    checkpointer.save(2, model, optimizer, {})
    train_normed(model, optimizer, 2, 4)
    checkpointer.wait()
    return at_save, lowband.full_state_dict(model)


def resume_normed(folder: str, inner: dict[str, int]):
    model, optimizer = build_normed(inner)
    torch.manual_seed(99)
    checkpointer = lowband.Checkpointer(Path(folder))
    checkpointer.load(checkpointer.latest(), model, optimizer)
    loaded = {name: buffer.clone() for name, buffer in model.named_buffers()}
    train_normed(model, optimizer, 2, 4)
    return loaded, lowband.full_state_dict(model)


def test_buffers_and_random_numbers_are_restored(tmp_path: Path) -> None:
    """Buffers are rank 0's on every rank of any job; dropout goes on as it would have at the same ranks."""
    saved = on_ranks(4, save_normed_and_go_on, str(tmp_path))
    assert not torch.equal(saved[0][0]["1.running_mean"], saved[1][0]["1.running_mean"])
    assert saved[0][0]["1.num_batches_tracked"] == 2
    for ranks, inner in ((4, INNER), (2, {"package": 2, "node": 2})):
        resumed = on_ranks(ranks, resume_normed, str(tmp_path), inner)
        for loaded, _ in resumed:
            assert all(torch.equal(loaded[name], value) for name, value in saved[0][0].items())
        if ranks == 4:
            assert all(torch.equal(resumed[0][1][name], value) for name, value in saved[0][1].items())


def files_saved(folder: str, scheme: str) -> None:
    model, optimizer = build(scheme, INNER, "adamw")
    train(model, optimizer, 0, 1)
    checkpointer = lowband.Checkpointer(folder)
    checkpointer.save(1, model, optimizer)
    checkpointer.wait()


@pytest.mark.parametrize(
    ("ranks", "scheme"),
    [
        (1, "ddp"),
        (4, "zero3"),
        (4, "diloco"),
        (8, "hier3"),
        *(pytest.param(8, name, marks=pytest.mark.wide) for name in ("hsdp", "diloco")),
    ],
)
def test_the_files_hold_the_bytes_of_the_closed_form(tmp_path: Path, ranks: int, scheme: str) -> None:
    on_ranks(ranks, files_saved, str(tmp_path), scheme)
    manifest = Manifest.read(tmp_path / "step-00000001")
    by_rank = [0] * ranks
    for saved in manifest.tensors.values():
        if saved.sharded:
            for chunk in saved.chunks:
                by_rank[chunk.rank] += chunk.length * saved.torch_dtype.itemsize
    levels, placed = Levels.fit(INNER, ranks), CONFIG.scheme(scheme)
    assert sum(by_rank) == all_bytes(SPEC.parameters, placed, levels)
    assert max(by_rank) <= rank_bytes(sum(unit_numels(SPEC, levels)), placed, levels)
    assert sum(count > 0 for count in by_rank) <= writers(placed, levels)
