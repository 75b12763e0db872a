"""A state_dict() that hooks or modules change: saved as that of a plain module, or refused on every rank."""

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from modules import Tower, inputs, is_layer
from safetensors.torch import load_file
from torch import nn

import lowband
from lowband.run.on_ranks import on_ranks
from lowband.spec.scheme import Scheme
from tests.refused import answer

ZERO3 = Scheme(name="zero3", weights="world", grads="world", optim="world")


class Renamed(Tower):
    """Its parameters and its buffer have other names in files."""

    def __init__(self) -> None:
        super().__init__()
        self._register_state_dict_hook(renamed)


def renamed(_module: nn.Module, state: dict[str, Any], prefix: str, _meta: object) -> None:
    for name in list(state):
        state[f"{prefix}model.{name.removeprefix(prefix)}"] = state.pop(name)


class Turned(nn.Linear):
    """Saves its weight transposed."""

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, _keep_vars: bool) -> None:
        destination[f"{prefix}turned"] = self.weight.t()


class Halved(nn.Linear):
    """Saves half of its weight."""

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, _keep_vars: bool) -> None:
        destination[f"{prefix}weight"] = self.weight.detach() / 2


def sharded(module: nn.Module) -> nn.Module:
    return lowband.shard(module, ZERO3, lowband.Topology({}), is_layer, compute_dtype=torch.float32)


def with_first(first: nn.Module) -> nn.Module:
    module = Tower()
    module.first = first
    return sharded(module)


def with_old_weight() -> nn.Module:
    module = sharded(Tower())
    module.register_buffer("old", module.first.weight.detach().clone())
    return module


def saved(folder: Path) -> tuple[dict[str, torch.Tensor], list[float], list[str]]:
    """The state of a module whose names a hook changes; its buffer after a load; what is refused."""
    module = sharded(Renamed())
    module.shift.fill_(3)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    checkpointer = lowband.Checkpointer(folder / "own")
    checkpointer.save(1, module, optimizer)
    lowband.save_safetensors(module, folder / "files")
    state = lowband.full_state_dict(module)
    module.shift.zero_()
    checkpointer.load_newest(module, optimizer)
    old = with_old_weight()
    said = [
        answer(lowband.full_state_dict, with_first(Turned(5, 7))),
        answer(lowband.full_state_dict, with_first(Halved(5, 7))),
        answer(lowband.full_state_dict, old),
        answer(checkpointer.save, 2, old, torch.optim.SGD(old.parameters(), lr=0.1)),
    ]
    module(inputs(0, dist.get_rank()))  # ranks have sent the same messages
    return state, module.shift.tolist(), said


def test_names_of_hooks_are_kept_and_parts_refused(tmp_path: Path) -> None:
    found = on_ranks(2, saved, tmp_path)
    plain = Renamed()
    plain.shift.fill_(3)
    expected = plain.state_dict()
    state = found[0][0]
    assert state.keys() == expected.keys()
    for name, value in state.items():
        assert torch.equal(value, expected[name])
    first = load_file(tmp_path / "files" / "model-00001-of-00004.safetensors")
    assert torch.equal(first["shift"], plain.shift)
    for _, shift, said in found:
        assert shift == [3] * 7
        assert said[0].startswith("first.weight: t of a shard covers this rank's part only")
        assert said[1].startswith(
            "Tower: 'first.weight' of its state_dict() was computed from this rank's part"
        )
        assert said[2:] == [said[2]] * 2
        assert said[2].startswith("Tower: 'old' of its state_dict() was computed from this rank's part")
