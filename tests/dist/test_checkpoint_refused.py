"""A save or a load that is refused changes nothing of the training; a load leaves no padding of before."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import lowband
from lowband.engine.passes.engine import engine_of
from lowband.run.on_ranks import on_ranks
from lowband.spec.offload import Offload
from lowband.spec.scheme import Scheme
from lowband.spec.sync import Sync
from tests.checkout import CONFIG

LATE = Scheme(name="late", weights="self", grads="world", optim="world@host", offload=Offload(late=True))
STEPS = 5


def made(scheme: Scheme | str) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(1)
    module = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 3))
    lowband.shard(module, scheme, lowband.Topology({}), nn.Linear, compute_dtype=torch.float32)
    return module, torch.optim.AdamW(module.parameters(), lr=1e-2)


def losses(folder: Path, how: str) -> list[float]:
    """With a refusal, if asked, while an update is on its way."""
    module, optimizer = made(LATE)
    checkpointer, found = lowband.Checkpointer(folder / how), []
    for step in range(STEPS):
        if step == 1:
            checkpointer.save(step, module, optimizer)
            checkpointer.wait()
        if step == 3 and how == "load":
            with pytest.raises(lowband.UserError, match="was saved with optimizer"):
                checkpointer.load_newest(module, torch.optim.SGD(module.parameters(), lr=1e-2))
        if step == 3 and how == "save":
            with pytest.raises(lowband.UserError, match="extra"):
                checkpointer.save(step, module, optimizer, {"x": object()})
        loss = module(torch.randn(8, 5, generator=torch.Generator().manual_seed(step))).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


def all_losses(folder: Path) -> list[list[float]]:
    return [losses(folder, how) for how in ("nothing", "load", "save")]


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_refusal_between_late_updates_changes_none(tmp_path: Path, ranks: int) -> None:
    for nothing, load, save in on_ranks(ranks, all_losses, tmp_path):
        assert load == nothing
        assert save == nothing


def told(folder: Path, optimizer: Any) -> str:
    module, own = made("zero3")
    given = [own] if optimizer == "list" else optimizer
    with pytest.raises(lowband.UserError) as error:
        lowband.Checkpointer(folder).save(1, module, given)
    return str(error.value)


@pytest.mark.parametrize("given", ["list", 3])
def test_one_optimizer_is_asked_for(tmp_path: Path, given: Any) -> None:
    for said in on_ranks(2, told, tmp_path, given):
        assert "(allowed: one torch.optim.Optimizer)" in said


def filled_and_loaded(folder: Path) -> list[torch.Tensor]:
    module, optimizer = made("zero3")
    checkpointer = lowband.Checkpointer(folder)
    checkpointer.save(0, module, optimizer)
    checkpointer.wait()
    before = [unit.master.clone() for unit in engine_of(module).units]
    with torch.no_grad():
        for shard in module.parameters():
            shard.fill_(9.0)
    checkpointer.load_newest(module, optimizer)
    after = [unit.master.clone() for unit in engine_of(module).units]
    return [torch.stack(pair) for pair in zip(before, after, strict=True)]


def test_a_load_leaves_zeros_in_the_padding(tmp_path: Path) -> None:
    """Which a quantized wire has in a block with weights."""
    for found in on_ranks(2, filled_and_loaded, tmp_path):
        assert all(torch.equal(before, after) for before, after in found)


def two_modules(folder: Path) -> dict[str, bool]:
    (actor, of_actor), (critic, of_critic) = made("zero3"), made("zero3")
    first, second = lowband.Checkpointer(folder), lowband.Checkpointer(folder)
    first.save(1, actor, of_actor)
    with torch.no_grad():
        for shard in critic.parameters():
            shard.add_(1.0)
    with pytest.raises(lowband.UserError, match="another module saves its checkpoints here"):
        second.save(1, critic, of_critic)  # the first may still be written
    first.save(2, actor, of_actor)
    first.wait()
    kept = [unit.master.clone() for unit in engine_of(actor).units]
    second.load_newest(critic, of_critic)
    loaded = [unit.master.clone() for unit in engine_of(critic).units]
    second.save(3, critic, of_critic)  # goes on from there
    second.wait()
    del actor, of_actor, critic, of_critic
    third, of_third = made("zero3")
    second.save(3, third, of_third)  # what saved there is gone
    second.wait()
    fourth, of_fourth = made("zero3")
    lowband.Checkpointer(folder.with_name("other")).save(3, fourth, of_fourth)
    for path in sorted(folder.iterdir()) if torch.distributed.get_rank() == 0 else []:
        path.rename(folder.with_name(f"{folder.name}-{path.name}"))
    torch.distributed.barrier()
    lowband.Checkpointer(folder).save(3, fourth, of_fourth)  # nothing is there any more
    return {"kept": all(torch.equal(before, after) for before, after in zip(kept, loaded, strict=True))}


def test_a_folder_is_of_one_module(tmp_path: Path) -> None:
    assert on_ranks(2, two_modules, tmp_path / "folder") == [{"kept": True}] * 2


def a_bad_step_on_rank_1(folder: Path) -> str:
    """Before the first step of replicas, which meet then."""
    scheme = CONFIG.scheme("local-sgd").model_copy(
        update={"sync": Sync(beyond="self", every=2), "weights": "self"}
    )
    module, optimizer = made(scheme.model_copy(update={"grads": "self", "optim": "self"}))
    checkpointer = lowband.Checkpointer(folder)
    with pytest.raises(lowband.UserError) as refused:
        checkpointer.save("0" if dist.get_rank() == 1 else 0, module, optimizer)
    checkpointer.save(0, module, optimizer)
    checkpointer.wait()
    return str(refused.value)


def test_a_refusal_on_one_rank_before_the_first_step_is_told_on_all(tmp_path: Path) -> None:
    for said in on_ranks(2, a_bad_step_on_rank_1, tmp_path):
        assert said.startswith("Checkpointer.save: step is '0'")
