"""What a forward changes in its arguments (tensors, lists, dicts) is the caller's: as without lowband."""

from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._pytree import register_dataclass

import lowband
from lowband.errors import UserError
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


# ---- programs whose caller finds the same as in plain torch


@dataclass
class Cache:
    """One that pytree opens."""

    values: torch.Tensor
    seen: int = 0


register_dataclass(Cache)


class Calling(nn.Module):
    """Its forward is a function of a layer, an input of the layer's dtype, and what the caller gives."""

    def __init__(self, forward: Callable[..., Any]) -> None:
        super().__init__()
        self.layer, self.of = nn.Linear(4, 4), forward

    def forward(self, *given: Any, **named: Any) -> Any:
        return self.of(self.layer, torch.ones(2, 4, dtype=torch.bfloat16), *given, **named)


class Twice(nn.Module):
    """Two units, of which the second gets what the first returns beside its result."""

    def __init__(self, forward: Callable[..., Any]) -> None:
        super().__init__()
        self.first, self.second = Calling(forward), Calling(forward)

    def forward(self, sides: list[Any]) -> Any:
        return self.second(self.first(sides)[1])


def adds(layer: nn.Module, x: torch.Tensor, into: torch.Tensor, same: torch.Tensor) -> torch.Tensor:
    into.add_(1)
    return layer(x) + same.sum().to(x.dtype)


def appends(layer: nn.Module, x: torch.Tensor, *into: Any) -> tuple[torch.Tensor, Any]:
    for each in into:
        each.append(len(each))
    return layer(x), into[0]


def names(layer: nn.Module, x: torch.Tensor, into: dict[str, Any]) -> torch.Tensor:
    into["shape"] = x.shape
    return layer(x)


def moves(layer: nn.Module, x: torch.Tensor, pairs: list[Any]) -> torch.Tensor:
    first, second = pairs[0]
    pairs[0] = (second, first, "seen")
    pairs.append([first, pairs])
    return layer(x)


def fills(layer: nn.Module, x: torch.Tensor, cache: Cache) -> torch.Tensor:
    cache.values, cache.seen = cache.values + 1, 5
    return layer(x)


def writes(layer: nn.Module, x: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        slots[0] = 5
    return layer(x)


def unsqueezes(layer: nn.Module, x: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    tokens.t_().unsqueeze_(1)
    tokens[0] = 7
    return layer(x)


def seen(is_sharded: bool) -> dict[str, Any]:
    """What callers see after the forwards, of arguments in fp32."""

    def made(forward: Callable[..., Any], of: type[nn.Module] = Calling) -> nn.Module:
        torch.manual_seed(0)
        model = of(forward).bfloat16()
        return lowband.shard(model, "zero3", lowband.Topology({}), Calling) if is_sharded else model

    def run(forward: Callable[..., Any], *given: Any, of: type[nn.Module] = Calling) -> Any:
        return made(forward, of)(*given)

    def fresh(numel: int = 3) -> torch.Tensor:
        return torch.full((numel,), 1.001)  # which bf16 has not

    found: dict[str, Any] = {}
    total = torch.zeros(2)
    found["a tensor given twice"] = run(adds, total, total).float().tolist(), total.tolist()
    sides = [torch.zeros(1)]
    run(appends, sides, sides)
    found["a list given twice"] = sides[1:]
    sides = [torch.zeros(1)]
    found["a list returned"] = run(appends, sides, of=Twice)[1] is sides, sides[1:]
    queue = deque([torch.zeros(1)], maxlen=2)
    run(appends, queue), run(appends, queue)
    found["a deque"] = [*queue]
    pairs: list[Any] = [(torch.ones(1), torch.zeros(1))]
    first, second = pairs[0]
    run(moves, pairs)
    found["moved"] = pairs[0][0] is second, pairs[0][1:], pairs[1][0] is first, pairs[1][1] is pairs
    inside: dict[str, Any] = {"x": torch.zeros(1)}
    inside["self"] = inside
    run(names, inside)
    found["in itself"] = inside["self"] is inside, inside["shape"]
    cache = Cache(fresh())
    run(fills, cache)
    found["of a class that pytree knows"] = cache.seen, cache.values.shape
    leaf, slots, unseen = fresh().requires_grad_(), fresh(), fresh()
    run(writes, leaf), run(writes, slots)
    found["one value written"] = leaf.tolist(), slots.tolist()
    with torch.no_grad():
        tokens = torch.arange(6.0).view(2, 3)
        run(unsqueezes, tokens)
    found["another shape"] = tokens.tolist()
    model = made(writes)
    with torch.inference_mode():
        model(unseen)
    found["in inference mode"] = unseen.tolist()
    return found


def test_callers_find_the_same_as_in_plain_torch() -> None:
    plain, sharded = on_ranks(1, lambda: [seen(False), seen(True)])[0]
    assert sharded == plain


def breadth_first() -> list[list[Any]]:
    model = lowband.shard(Twice(appends), "zero3", lowband.Topology({}), Calling)
    sides: list[list[Any]] = [[torch.zeros(1)], [torch.zeros(1)]]
    lowband.accumulate(model, sides, lambda mine: model(mine)[0].float().mean())
    return [mine[1:] for mine in sides]


def test_breadth_first_a_list_that_units_hand_on_is_one() -> None:
    assert on_ranks(1, breadth_first)[0] == [[1, 2], [1, 2]]


def test_a_shape_that_cannot_be_given_back_is_refused_in_one_line() -> None:
    def said() -> str:
        model = lowband.shard(Calling(unsqueezes), "zero3", lowband.Topology({}), Calling)
        with pytest.raises(UserError) as error:
            model(torch.arange(12.0).view(3, 4)[:, ::2])
        return str(error.value)

    assert on_ranks(1, said)[0] == (
        "Calling: an input of shape [3, 2] has got [2, 1, 3] in place "
        "(allowed: inputs that are contiguous, or shapes changed out of place)"
    )
