"""A checkpoint beside gradients that wait: backward passes under `no_sync` have left them to a later one.

No checkpoint has gradients, ours or others'. Those that no rank can see yet would be lost on a save, and
added to those of other weights after a load.
"""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from checkpoints import adamw
from modules import INNER, inputs
from torch import nn

import lowband
from lowband.run.on_ranks import on_ranks
from tests.refused import answer

WAIT = "'0.weight' has gradients of backwards under no_sync, which"
SAVED = (
    f"Checkpointer.save: {WAIT} a checkpoint would leave out "
    "(allowed: a save behind optimizer.step(); zero_grad() to discard them)"
)
LOADED = (
    f"Checkpointer.load: {WAIT} would be added to those of the loaded weights "
    "(allowed: zero_grad() first, which discards them)"
)


Answers = tuple[str, ...]


def beside_waiting(folder: str, how: str) -> tuple[Answers, Answers, int, Answers]:
    """Answers to a save and to loads while gradients wait, and once they do not; checkpoints until then."""
    torch.manual_seed(0)
    chain = nn.Sequential(nn.Linear(5, 5), nn.Linear(5, 3))
    model = lowband.shard(chain, "zero3", lowband.Topology(INNER), nn.Linear, torch.float32)
    optimizer, checkpointer = adamw(model), lowband.Checkpointer(folder)
    newest = Path(folder) / "step-00000001"

    def loss_of(batch: torch.Tensor) -> torch.Tensor:
        return model(batch).square().mean()

    def backward() -> None:
        batch = inputs(0, dist.get_rank())
        if how == "accumulate":
            lowband.accumulate(model, [batch, batch], loss_of)
        else:
            loss_of(batch).backward()

    def answers() -> Answers:
        save = answer(lambda: checkpointer.save(2, model, optimizer))
        checkpointer.wait()
        loads = (lambda: checkpointer.load(newest, model, optimizer),
                 lambda: checkpointer.load_newest(model, optimizer))  # fmt: skip
        return save, *map(answer, loads)

    checkpointer.save(1, model, optimizer)
    checkpointer.wait()
    with lowband.no_sync(model):
        backward()
    waiting = answers()
    found = len([*Path(folder).iterdir()])
    backward()
    optimizer.step()
    stepped = answers()
    with lowband.no_sync(model):
        backward()
    optimizer.zero_grad()
    return waiting, stepped, found, answers()


@pytest.mark.parametrize("how", ["no_sync", "accumulate"])
def test_gradients_that_wait_are_neither_lost_nor_kept(tmp_path: Path, how: str) -> None:
    for waiting, stepped, found, discarded in on_ranks(2, beside_waiting, str(tmp_path), how):
        assert waiting == (SAVED, LOADED, LOADED)
        assert stepped == discarded == ("", "", "")
        assert found == 1
