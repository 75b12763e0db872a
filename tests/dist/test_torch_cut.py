"""Modules that torch's `parallelize_module` has cut, under `lowband.shard`: one process and FSDP2 agree."""

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from kept import has_memory
from near import assert_near
from safetensors.torch import load_file
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.multiprocessing.reductions import StorageWeakRef
from torch_cut import CLIP, Layer, alone, batch, cut, loss_of, net, tensor_mesh, under_fsdp2, under_lowband

import lowband
from lowband.engine.api import engine_of
from lowband.run.on_ranks import on_ranks
from tests.refused import refusal

WIDE = pytest.mark.wide


@pytest.mark.parametrize(
    ("scheme", "sequence", "way", "ranks"),
    [
        ("zero3", True, "loop", 4),
        ("ddp", False, "recompute", 2),
        pytest.param("zero1", False, "breadth", 4, marks=WIDE),
        pytest.param("zero3", False, "recompute", 4, marks=WIDE),
        pytest.param("zero2", True, "breadth", 4, marks=WIDE),
        pytest.param("hpz", True, "recompute", 8, marks=WIDE),
        pytest.param("hsdp", False, "loop", 8, marks=WIDE),
        pytest.param("hier3-exact", True, "loop", 8, marks=WIDE),
    ],
)
def test_trains_as_one_process(scheme: str, sequence: bool, way: str, ranks: int) -> None:
    """In fp64, rounded to fp32 where shards are; a second step finds what the first one left."""
    inner = {"package": 2, "node": 4} if ranks == 8 else {}
    found = on_ranks(ranks, under_lowband, scheme, sequence, torch.float64, way, inner)
    [(losses, norms, weights)] = on_ranks(1, alone, torch.float64, ranks // 2)
    assert norms[0] > CLIP
    for rank, (mine, of_clip, _) in enumerate(found):
        assert mine[0] == pytest.approx(losses[rank // 2][0], rel=1e-12)
        assert mine[1] == pytest.approx(losses[rank // 2][1], rel=1e-6)
        assert of_clip == found[0][1] == pytest.approx(norms, rel=1e-6)
    state = found[0][2]
    assert_near(state, {name: value.float() for name, value in weights.items()}, rtol=1e-6, atol=1e-6)


def test_trains_as_fsdp2_does_on_the_same_ranks() -> None:
    ours = on_ranks(4, under_lowband, "zero3", True, torch.float32)
    theirs = on_ranks(4, under_fsdp2, True)
    for (losses, norms, _), (their_losses, their_norms, _) in zip(ours, theirs, strict=True):
        assert losses == pytest.approx(their_losses, rel=1e-6)
        assert norms == pytest.approx(their_norms, rel=1e-5)
    assert_near(ours[0][2], theirs[0][2], rtol=1e-5, atol=1e-6)


# ---- checkpoints


def saved(folder: Path, sequence: bool) -> None:
    topology = lowband.Topology({}, lowband.Axes(tensor=2))
    model = cut(net(torch.float32), tensor_mesh(topology), sequence)
    lowband.shard(model, "zero3", topology, Layer, compute_dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3)
    step(model, optimizer, 0, topology.along("data").place)
    checkpointer = lowband.Checkpointer(folder / "own")
    checkpointer.save(0, model, optimizer)
    checkpointer.wait()
    lowband.save_safetensors(model, folder / "safetensors")


def step(model: nn.Module, optimizer: torch.optim.Optimizer, number: int, *data: int) -> float:
    """On the batches of ranks along data; the mean of their losses."""
    losses = [loss_of(model, batch(number, 0, rank)) for rank in data]
    sum(losses).div(len(data)).backward()
    lowband.clip_grad_norm_(model, CLIP)
    optimizer.step()
    optimizer.zero_grad()
    return float(sum(losses)) / len(data)


def resumed(folder: Path, tensor: int) -> list[float]:
    """Losses of the next two steps, after the checkpoint was read by another division."""
    topology = lowband.Topology({}, lowband.Axes(tensor=tensor))
    model = net(torch.float32)
    if tensor > 1:
        cut(model, tensor_mesh(topology), sequence=False)
    lowband.shard(model, "zero1", topology, Layer, compute_dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3)
    lowband.Checkpointer(folder / "own").load_newest(model, optimizer)
    return [step(model, optimizer, number, 0, 1) for number in (1, 2)]


def unbroken() -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses of the steps behind the first, in plain torch; weights after the first."""
    model, losses, weights = net(torch.float32), [], {}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3)
    for number in range(3):
        each = [loss_of(model, batch(number, 0, rank)) for rank in (0, 1)]
        sum(each).div(2).backward()
        nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(sum(each)) / 2)
        weights = weights or {name: value.clone() for name, value in model.state_dict().items()}
    return losses[1:], weights


def test_checkpoints_have_whole_parameters(tmp_path: Path) -> None:
    """Saved by two tensor ranks times two with sequence parallelism; read by two tensor ranks, and by one."""
    on_ranks(4, saved, tmp_path, True)
    [(losses, weights)] = on_ranks(1, unbroken)
    for tensor in (1, 2):
        for found in on_ranks(tensor, resumed, tmp_path, tensor):
            assert found == pytest.approx(losses, rel=1e-5)
    exported = {
        n: v for path in (tmp_path / "safetensors").glob("*.safetensors") for n, v in load_file(path).items()
    }
    assert exported.keys() == weights.keys()
    for name, value in weights.items():
        torch.testing.assert_close(exported[name], value, rtol=1e-4, atol=2e-5)


# ---- what is held and said


def held_and_said(folder: Path) -> tuple[list[bool], list[str]]:
    """Whether gathered weights have memory between forward and backward; tags of curves."""
    topology = lowband.Topology({}, lowband.Axes(tensor=2))
    model = cut(net(torch.float32), tensor_mesh(topology), sequence=True)
    lowband.shard(model, "zero3", topology, Layer, compute_dtype=torch.float32)
    storages = []
    for unit in engine_of(model).units:
        finish = unit.finish_gather

        def watched(finish=finish, unit=unit) -> None:
            finish()
            if unit.name != "root":
                storages.append(StorageWeakRef(unit.flat.untyped_storage()))

        unit.finish_gather = watched
    loss = loss_of(model, batch(0, 0, 0))
    alive = [*map(has_memory, storages)]
    loss.backward()
    with lowband.Curves("tensorboard", folder, "run") as curves:
        curves.add(0, {"loss": float(loss)}, model)
    return alive, sorted(engine_of(model).ledger.not_counted)


def test_gathered_weights_are_freed_and_bytes_are_marked_as_not_counted(tmp_path: Path) -> None:
    """Between forward and backward, although autograd has saved DTensors around them."""
    for alive, not_counted in on_ranks(4, held_and_said, tmp_path):
        assert len(alive) >= 2
        assert not any(alive)
        assert not_counted == ["tensor"]
    tags = EventAccumulator(str(tmp_path / "run")).Reload().Tags()["scalars"]
    assert "sent_bytes/tensor_not_counted" in tags
    assert "sent_bytes/world" in tags


# ---- what is refused


class Uneven(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(4, 5)


def refused() -> list[str]:
    topology = lowband.Topology({}, lowband.Axes(tensor=2))
    mesh, texts = tensor_mesh(topology), []

    def say(make, topology: lowband.Topology = topology) -> None:
        texts.append(refusal(make, topology))

    def shard(module: nn.Module, topology: lowband.Topology) -> None:
        lowband.shard(module, "zero3", topology, Layer, compute_dtype=torch.float32)

    def uneven(topology: lowband.Topology) -> None:
        shard(parallelize_module(Uneven(), mesh, {"up": ColwiseParallel()}), topology)

    def other_values(topology: lowband.Topology) -> None:
        model = cut(net(torch.float32), mesh, sequence=False)
        with torch.no_grad():
            model.norm.weight += topology.along("tensor").place
        shard(model, topology)

    def both(topology: lowband.Topology) -> None:
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        lowband.parallelize(model[0], {"": lowband.Column()}, topology)
        parallelize_module(model, mesh, {"1": ColwiseParallel()})
        shard(model, topology)

    def on_data(topology: lowband.Topology) -> None:
        shard(cut(net(torch.float32), init_device_mesh("cpu", (2,)), sequence=False), topology)

    def pipeline(topology: lowband.Topology) -> None:
        chain = [nn.Linear(4, 4), nn.Linear(4, 4)]
        for module in chain:
            parallelize_module(module, mesh, ColwiseParallel())
        lowband.Pipeline(chain, F.mse_loss, "zero3", topology, 1, "depth")

    for make in (uneven, other_values, both, pipeline):
        say(make)
    say(on_data, lowband.Topology({}))
    return texts


def test_what_is_refused() -> None:
    for uneven, other_values, both, pipeline, on_data in on_ranks(2, refused):
        assert "'up.weight' has 5 values along dimension 0, which cannot be divided over tensor 2" in uneven
        assert "differs from rank 0 in sum of initial weights" in other_values
        assert "parts are cut by lowband.parallelize, others by torch's parallelize_module" in both
        assert "'0.weight' is a DTensor" in pipeline
        assert "is a DTensor over ranks [0, 1], and this rank's tensor axis is [" in on_data
