"""What a forward changes in its arguments (tensors, lists, dicts) is the caller's: as without lowband."""

from collections import OrderedDict, defaultdict
from typing import Any

import torch
from torch import nn

import lowband
from lowband.run.on_ranks import on_ranks


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, sides: list[Any], total: torch.Tensor, *, cache: dict) -> torch.Tensor:
        y = torch.tanh(self.layer(x))
        sides.append(y.square().mean())
        cache[f"of block {len(cache['lists'][0])}"] = y.detach()
        cache["lists"][0].append(x.shape)
        cache["sum"] += sides[-1].detach()
        total += sides[-1]
        if len(cache["lists"][0]) == 2:
            del cache["old"]
        return x + y


class Net(nn.Module):
    """Its blocks fill what the caller gives it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first = nn.Linear(4, 4)
        self.blocks = nn.ModuleList(Block() for _ in range(2))

    def forward(self, batch: dict[str, Any], sides: list[Any], cache: dict[str, Any]) -> torch.Tensor:
        x, total = self.first(batch["x"]), torch.zeros(())
        for block in self.blocks:
            x = block(x, sides, total, cache=cache)
        if batch["fails"]:
            raise ZeroDivisionError
        assert total.requires_grad and torch.isclose(total, sum(sides[1:]).float(), atol=0.02)
        return x.square().mean() + sum(sides)


def filled(dtype: torch.dtype, kind: type, fails: bool) -> dict[str, Any]:
    """What the caller finds; in the containers there are fp32 values before, which another dtype casts."""
    model = lowband.shard(Net(), "zero3", lowband.Topology({}), Block, compute_dtype=dtype)
    batch = {"x": torch.linspace(-1, 1, 8).view(2, 4), "fails": fails}
    start, total, old = torch.ones(()), torch.zeros(()), torch.ones(3)
    cache = kind(list) if kind is defaultdict else kind()
    lists = ([],)
    cache |= {"lists": lists, "sum": total, "old": old, "kept": start}
    sides, before, given = [start], dict(batch), lists[0]
    try:
        model(batch, sides, cache).backward()
    except ZeroDivisionError:
        assert fails
    assert all(batch[key] is value for key, value in before.items())
    return {
        "sides": len(sides), "same": sides[0] is start and cache["kept"] is start and lists[0] is given,
        "graph": all(side.requires_grad for side in sides[1:]), "lists": len(given), "keys": list(cache),
        "sum": cache["sum"] is total and abs(float(cache["sum"]) - sum(map(float, sides[1:]))) < 0.02,
        "gradient": all(p.grad is not None for p in model.blocks.parameters()),
    }  # fmt: skip


def every_way() -> list[dict[str, Any]]:
    kinds = dict, OrderedDict, defaultdict
    found = [filled(dtype, kind, False) for dtype in (torch.float32, torch.bfloat16) for kind in kinds]
    return [*found, filled(torch.bfloat16, dict, True)]


def test_the_callers_get_what_forwards_put_into_them() -> None:
    keys = ["lists", "sum", "kept", "of block 0", "of block 1"]
    expected = {
        "sides": 3, "same": True, "graph": True, "lists": 2, "keys": keys, "sum": True, "gradient": True
    }  # fmt: skip
    for found in on_ranks(2, every_way):
        *whole, failed = found
        assert all(each == expected for each in whole)
        assert failed == {**expected, "gradient": False}
