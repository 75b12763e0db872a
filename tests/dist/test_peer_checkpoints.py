"""Checkpoints that FSDP2 and DeepSpeed wrote, read into shards: the same weights, the same losses after."""

import os
import pickle
import shutil
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from checkpoints import everything
from peer_checkpoints import LAST, SAVED, Block, Net, batch, groups, mean_loss, train_deepspeed, train_fsdp2
from test_tiers import placed
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict

import lowband
from lowband.engine.checkpoint.peer_checkpoint import _stored
from lowband.run.on_ranks import on_ranks
from lowband.trainers import deepspeed as peer
from tests.refused import refusal

PEERS = {"fsdp2": None, "zero1": 1, "zero2": 2, "zero3": 3}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory):
    """By peer: folder, weights when it was saved, losses of the peer that goes on. Made when asked for."""
    made = {}

    def of(name: str):
        if name not in made:
            folder, stage = tmp_path_factory.mktemp(name), PEERS[name]
            if stage is None:
                made[name] = (folder, *on_ranks(2, train_fsdp2, folder)[0])
            else:
                peer.load("cpu")  # before ranks are forked
                made[name] = (folder, *on_ranks(2, train_deepspeed, folder, stage)[0])
        return made[name]

    return of


def sharded(scheme: str = "zero3", make=torch.optim.AdamW, **options):
    """Other weights, buffers and learning rates than were saved: what is not loaded shows."""
    topology = lowband.Topology({"node": 2} if dist.get_world_size() % 2 == 0 else {})
    model = lowband.shard(Net(seed=9), scheme, topology, Block, torch.float32)
    return model, make(groups(model.parameters()), **options)


def resume(folder: Path, scheme: str):
    model, optimizer = sharded(scheme)
    for group in optimizer.param_groups:
        group["lr"] = 9.0
    extra = lowband.load_peer_checkpoint(folder, model, optimizer)
    weights, losses = lowband.full_state_dict(model), []
    for step in range(SAVED + 1, LAST + 1):
        loss = model(batch(step))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(mean_loss(loss))
    return extra, weights, losses


@pytest.mark.parametrize(
    ("name", "ranks", "scheme"),
    [
        ("fsdp2", 3, "zero3"),
        ("zero1", 3, "zero2"),
        ("zero3", 2, "hsdp"),
        *(
            pytest.param(name, ranks, scheme, marks=pytest.mark.wide)
            for name, ranks, scheme in (
                ("fsdp2", 1, "zero3"), ("zero3", 3, "zero3"),
                ("fsdp2", 2, "hsdp"), ("zero1", 1, "zero3"), ("zero1", 2, "ddp"), ("zero2", 1, "ddp"),
                ("zero2", 2, "zero3"), ("zero2", 3, "zero3"), ("zero3", 1, "zero3"),
            )
        ),
    ],
)  # fmt: skip
def test_weights_are_equal_and_losses_go_on(saved, name: str, ranks: int, scheme: str) -> None:
    folder, weights, losses = saved(name)
    extra, loaded, ours = on_ranks(ranks, resume, folder, scheme)[0]
    assert extra["step"] == SAVED
    assert {key for key in weights if "head" not in key} == {key for key in loaded if "head" not in key}
    assert all(torch.equal(loaded[key], weights[key]) for key in loaded)
    assert ours == pytest.approx(losses, rel=2e-6)
    assert len({round(loss, 3) for loss in losses}) == len(losses)  # they move


def weights_alone(folder: Path) -> tuple[bool, int]:
    model, _ = sharded()
    extra = lowband.load_peer_checkpoint(folder, model)
    return lowband.full_state_dict(model), extra["step"]


class Counting:
    """A reader of a checkpoint whose counts of steps are numbers, as DeepSpeed's are."""

    def states(self, _: str) -> dict[str, int]:
        return {"step": 1001}  # which bf16 has not


def count_in_bf16() -> list[float]:
    torch.set_default_dtype(torch.bfloat16)
    return _stored(Counting(), "optimizer.step.head.weight").read(0, 1).tolist()


def test_a_count_of_steps_is_whole_whatever_the_default_dtype_is() -> None:
    assert on_ranks(1, count_in_bf16) == [[1001.0]]


def test_weights_alone(saved) -> None:
    folder, weights, _ = saved("fsdp2")
    loaded, step = on_ranks(2, weights_alone, folder)[0]
    assert step == SAVED
    assert all(torch.equal(loaded[key], weights[key]) for key in loaded)


def save_beside(folder: Path, named: bool) -> list[float]:
    """A plain module's checkpoint with more than model and optimizer; losses behind it.

    named: whether states have their parameters' names
    """
    model = Net()
    optimizer = torch.optim.AdamW(groups(model.parameters()))
    losses = []
    for step in range(1, LAST + 1):
        loss = model(batch(step))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss))
        if step == SAVED:
            of_optimizer = get_state_dict(model, optimizer)[1] if named else optimizer.state_dict()
            beside = {
                "train": {"step": torch.tensor(step, dtype=torch.int32), "seen": 7, "mean": torch.ones(3)}
            }
            beside |= {"rng": torch.get_rng_state(), "other": Ran(folder / "ran")}
            dcp.save({"model": model.state_dict(), "optimizer": of_optimizer, **beside}, checkpoint_id=folder)
    return losses[SAVED:]


def resume_with_warnings(folder: Path):
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        extra, _, losses = resume(folder, "zero3")
    return extra, losses, [str(each.message) for each in said if "left out" in str(each.message)]


def test_what_was_saved_beside_is_returned_but_for_what_is_large_or_code(tmp_path: Path) -> None:
    [losses] = on_ranks(1, save_beside, tmp_path, True)
    (extra, ours, said), (_, _, silent) = on_ranks(2, resume_with_warnings, tmp_path)
    assert ours == pytest.approx(losses, rel=2e-6)
    assert (int(extra["train.step"]), extra["train.seen"]) == (SAVED, 7)
    assert extra["rng"].dtype == torch.uint8
    assert extra["rng"].ndim == 1
    assert extra.keys() & {"train.mean", "other"} == set()
    assert [line.split(": ", 1)[1] for line in said] == [
        "tensors, and objects that need code to be read, are left out of what is returned: 2, as 'train.mean'"
    ]
    assert not silent
    assert not (tmp_path / "ran").exists()


def save_bare(folder: Path, is_damaged: bool) -> None:
    """Weights without a prefix, as torchtitan saves them, and states without the parameters' names."""
    model = Net()
    optimizer = torch.optim.AdamW(groups(model.parameters()))
    model(batch(1)).backward()
    optimizer.step()
    beside = {"optimizer": optimizer.state_dict(), "train": {"step": 3, "of": {"a": 1}}}
    dcp.save({**model.state_dict(), **beside}, checkpoint_id=folder)
    if is_damaged:
        place = dcp.FileSystemReader(folder).read_metadata().storage_data
        [info] = [info for index, info in place.items() if index.fqn == "train.step"]
        with (folder / info.relative_path).open("r+b") as file:
            file.seek(info.offset)
            file.write(b"\0" * info.length)


def load_bare(folder: Path) -> tuple[dict[str, Any], list[str]]:
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        extra = lowband.load_peer_checkpoint(folder, sharded()[0])
    return extra, [str(each.message) for each in said if "left out" in str(each.message)]


def test_weights_without_a_prefix_are_not_beside_themselves(tmp_path: Path) -> None:
    on_ranks(1, save_bare, tmp_path, False)
    assert on_ranks(1, load_bare, tmp_path) == [({"train.step": 3, "train.of.a": 1}, [])]


def test_an_object_that_is_damaged_is_refused(tmp_path: Path) -> None:
    on_ranks(1, save_bare, tmp_path, True)
    [said] = on_ranks(1, refused_alone, tmp_path)
    assert "is damaged" in said


def refused_alone(folder: Path) -> str:
    return refusal(lambda: lowband.load_peer_checkpoint(folder, sharded()[0]))


def test_states_without_the_parameters_names_are_refused(tmp_path: Path) -> None:
    on_ranks(1, save_beside, tmp_path, False)
    for said in on_ranks(2, refused, tmp_path):
        assert said == (
            "FOLDER: has no optimizer's states under the parameters' names, as `get_state_dict` gives them "
            "(allowed: optimizer=None for the weights alone)"
        )
    [(_, step)] = on_ranks(1, weights_alone_of_train, tmp_path)
    assert step == SAVED


def weights_alone_of_train(folder: Path) -> tuple[bool, int]:
    model, _ = sharded()
    extra = lowband.load_peer_checkpoint(folder, model)
    return all(p.isfinite().all() for p in lowband.full_state_dict(model).values()), int(extra["train.step"])


def resume_from_disk(folder: Path, tmp: Path) -> tuple[list[float], str]:
    """Losses, and what a load without the optimizer says."""
    scheme = placed("zero3", "disk")
    model = lowband.shard(Net(seed=9), scheme, lowband.Topology({}), Block, torch.float32, disk=tmp)
    optimizer = torch.optim.AdamW(groups(model.parameters()))
    says = refusal(lambda: lowband.load_peer_checkpoint(folder, model))
    lowband.load_peer_checkpoint(folder, model, optimizer)
    losses = []
    for step in range(SAVED + 1, LAST + 1):
        loss = model(batch(step))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(mean_loss(loss))
    return losses, says


def test_states_on_a_disk_are_filled(saved, tmp_path: Path) -> None:
    folder, _, losses = saved("fsdp2")
    for ours, says in on_ranks(2, resume_from_disk, folder, tmp_path):
        assert ours == pytest.approx(losses, rel=2e-6)
        assert says.startswith("load_peer_checkpoint: states are on a disk, with the weights, between")


# ---- what is refused, in one line, and changes nothing


def refused(folder: Path, make=None) -> str:
    model, optimizer = (make or sharded)()
    before = everything(model, optimizer)
    try:
        lowband.load_peer_checkpoint(folder, model, optimizer)
    except lowband.UserError as error:
        assert everything(model, optimizer) == before
        assert "\n" not in str(error)
        return str(error).replace(str(folder), "FOLDER")
    return "loaded"


def momentum(parameters):
    return torch.optim.SGD(parameters, momentum=0.9)


def with_sgd():
    return sharded(make=momentum)


def with_amsgrad():
    return sharded(amsgrad=True)


def with_adam():
    return sharded(make=torch.optim.Adam)


def wider():
    model = lowband.shard(nn.Sequential(nn.Linear(3, 5)), "zero3", lowband.Topology({}), Block, torch.float32)
    return model, torch.optim.AdamW(model.parameters())


def one_group():
    model, _ = sharded()
    return model, torch.optim.AdamW(model.parameters())


@pytest.mark.parametrize("name", ["fsdp2", "zero3"])
@pytest.mark.parametrize(
    ("make", "words"),
    [
        (with_sgd, "optimizer: is SGD (allowed: torch's Adam or AdamW, or None)"),
        (with_amsgrad, "param group 0: amsgrad is True (allowed: False, as saved)"),
        (with_adam, "param group 0: decoupled_weight_decay is False (allowed: True, as saved)"),
        (one_group, "parameters of param group 0 have several values of lr (allowed: param groups as they"),
        (wider, "'0.weight'"),
    ],
)
def test_what_does_not_fit_is_refused(saved, name: str, make, words: str) -> None:
    [said] = on_ranks(1, refused, saved(name)[0], make)
    assert words in said


def looked_for(folder: Path) -> str:
    model, optimizer = sharded()
    try:
        return str(lowband.Checkpointer(folder).load_newest(model, optimizer))
    except lowband.UserError as error:
        return str(error)


@pytest.mark.parametrize(("file", "is_peers"), [(".metadata", True), ("latest", True), ("notes.txt", False)])
def test_a_peers_checkpoint_is_not_taken_for_a_folder_without_any(
    file: str, is_peers: bool, tmp_path: Path
) -> None:
    """Or a run that should go on would silently start anew."""
    (tmp_path / file).touch()
    says = f"{tmp_path}: is a checkpoint of FSDP2's or DeepSpeed's (allowed: lowband.load_peer_checkpoint)"
    assert on_ranks(2, looked_for, tmp_path) == [says if is_peers else "None"] * 2


def test_states_that_are_not_adams_are_refused(tmp_path: Path) -> None:
    on_ranks(2, train_fsdp2, tmp_path, momentum)
    said = on_ranks(2, refused, tmp_path)
    assert said == [said[0]] * 2
    assert said[0] == (
        "FOLDER: the optimizer's states of 'embed.weight' are not Adam's: momentum_buffer (allowed: exp_avg, "
        "exp_avg_sq, max_exp_avg_sq, step; optimizer=None for the weights alone)"
    )


class Ran:
    """Unpickled by Python's own reader, it makes a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __reduce__(self):
        return os.mkdir, (str(self.folder),)


def a_stranger_s_metadata(folder: Path) -> str:
    (folder / ".metadata").write_bytes(pickle.dumps(Ran(folder / "ran")))
    return ".metadata: is damaged, or has other objects: posix.mkdir"


def a_stranger_s_chunk(folder: Path) -> str:
    path = next(folder.glob("*.distcp"))
    torch.save(Ran(folder / "ran"), path)
    return path.name


def half_a_file(folder: Path) -> str:
    path = max(folder.glob("*.distcp"))
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    return path.name


def a_lost_file(folder: Path) -> str:
    path = max(folder.glob("*.distcp"))
    path.unlink()
    return f"{path.name}: cannot be read: No such file"


def no_checkpoint(folder: Path) -> str:
    (folder / ".metadata").unlink()
    return "no checkpoint (allowed: a folder of dcp.save or of DeepSpeed's save_checkpoint)"


def a_stranger_s_optimizer(folder: Path) -> str:
    path = max(folder.glob("*/*optim_states.pt"))
    torch.save({"optimizer_state_dict": Ran(folder / "ran")}, path)
    return f"{path.name}: has other objects than tensors: "


def half_an_optimizer(folder: Path) -> str:
    path = max(folder.glob("*/*optim_states.pt"))
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    return f"{path.name}: is damaged"


def the_last_rank_lost(folder: Path) -> str:
    max(folder.glob("*/*optim_states.pt")).unlink()
    return "has the optimizer files of 1 of 2 ranks"


def the_first_rank_lost(folder: Path) -> str:
    min(folder.glob("*/*optim_states.pt")).unlink()
    return "has no optimizer file of rank 0"


def tensor_ranks(folder: Path) -> str:
    path = max(folder.glob("*/*optim_states.pt"))
    path.rename(path.with_name(path.name.replace("mp_rank_00", "mp_rank_01")))
    return "of other ranks than data-parallel ones"


def a_way_out(folder: Path) -> str:
    (folder / "latest").write_text("../elsewhere")
    return "latest: names '../elsewhere' (allowed: a folder beside it)"


def other_shapes(folder: Path) -> str:
    for path in folder.glob("*/*model_states.pt"):
        content = torch.load(path, weights_only=True)
        content["param_shapes"][0]["embed.weight"] = torch.Size((11, 9))
        torch.save(content, path)
    return "is not as ZeRO's stages save it: ValueError group 0 has"


def a_short_state(folder: Path) -> str:
    for path in folder.glob("*/*optim_states.pt"):
        content = torch.load(path, weights_only=False)  # written by this test
        for state in content["optimizer_state_dict"]["optimizer_state_dict"]["state"].values():
            state["exp_avg"] = state["exp_avg"][:-1].clone()
        torch.save(content, path)
    return "an optimizer's state is too short"


OF_FSDP2 = (a_stranger_s_metadata, a_stranger_s_chunk, half_a_file, a_lost_file, no_checkpoint)
OF_ZERO3 = (
    a_stranger_s_optimizer, half_an_optimizer, the_last_rank_lost, the_first_rank_lost, tensor_ranks,
    a_way_out, other_shapes, a_short_state,
)  # fmt: skip


@pytest.mark.parametrize(
    ("peer", "harm"), [*(("fsdp2", harm) for harm in OF_FSDP2), *(("zero3", harm) for harm in OF_ZERO3)]
)
def test_a_damaged_or_hostile_checkpoint_is_refused(saved, peer: str, harm, tmp_path: Path) -> None:
    folder = tmp_path / "copy"
    shutil.copytree(saved(peer)[0], folder)
    words = harm(folder)
    [said] = on_ranks(1, refused, folder)
    assert words in said
    assert not (folder / "ran").exists()
