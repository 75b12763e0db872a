"""An optimizer takes the states of its own parts, and of no other rank's or whole parameters."""

import io

import torch
import torch.distributed as dist
from modules import Tower, inputs, is_layer
from torch import nn

import lowband
from lowband.run.on_ranks import on_ranks
from tests.refused import answer


def stepped(module: nn.Module) -> torch.optim.Optimizer:
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.01)
    module(inputs(0, 0)).backward()
    optimizer.step()
    return optimizer


def sharded(scheme: str) -> nn.Module:
    return lowband.shard(Tower(), scheme, lowband.Topology({}), is_layer, compute_dtype=torch.float32)


def loaded(scheme: str) -> list[str]:
    """What is said of rank 0's states on all ranks, as a script has them that saves on rank 0; of each rank's
    own; of the plain module's; and of the own ones without the note of their parts.
    """
    module = sharded(scheme)
    optimizer, file = stepped(module), io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    everyones: list[bytes] = [b""] * dist.get_world_size()
    dist.all_gather_object(everyones, file.getvalue())
    first, own = (torch.load(io.BytesIO(each)) for each in (everyones[0], everyones[dist.get_rank()]))
    plain = stepped(Tower()).state_dict()
    bare = {key: own[key] for key in ("state", "param_groups")}
    return [
        answer(torch.optim.AdamW(module.parameters(), lr=0.1).load_state_dict, state)
        for state in (first, own, plain, bare)
    ]


def test_states_of_other_parts_are_refused() -> None:
    first, second = on_ranks(2, loaded, "zero3")
    assert first[:2] == ["", ""] and second[1] == "" and first[3] == second[3] == ""
    assert second[0].startswith("load_state_dict() of AdamW: the state is of values 0 to ")
    for said in (first, second):
        assert "a state of shape " in said[2] and "is not of this rank's part of '" in said[2]


def loaded_without_the_note() -> str:
    """What is said of states some of which are sums along rows and columns."""
    module = sharded("zero3")
    optimizer = lowband.Adafactor(module.parameters())
    module(inputs(0, 0)).backward()
    optimizer.step()
    state = optimizer.state_dict()
    bare = {key: state[key] for key in ("state", "param_groups")}
    return answer(lowband.Adafactor(module.parameters()).load_state_dict, bare)


def test_sums_are_no_other_part() -> None:
    assert on_ranks(2, loaded_without_the_note) == ["", ""]


def test_copies_are_taken_from_any_rank() -> None:
    for said in on_ranks(2, loaded, "ddp"):
        assert said[:2] == ["", ""]
