"""Programs that divide tokens over ranks along context and leave something out are warned of."""

import warnings
from copy import deepcopy

import torch
import torch.nn.functional as F
from torch import nn

import lowband
from lowband.run.on_ranks import on_ranks

WIDTH, TOKENS = 8, 8


class Layer(nn.Module):
    def __init__(self, context: lowband.Context | None, inner: nn.Module) -> None:
        super().__init__()
        self.context, self.inner, self.qkv = context, inner, nn.Linear(WIDTH, 3 * WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (each.unflatten(-1, (2, -1)).transpose(1, 2) for each in self.qkv(x).chunk(3, -1))
        own = F.scaled_dot_product_attention
        y = own(q, k, v, is_causal=True) if self.context is None else self.context.attention(q, k, v)
        return x + y.transpose(1, 2).flatten(2)


def said(left_out: str, ranks: int) -> list[str]:
    """Warnings of two steps of a program."""
    topology = lowband.Topology({}, lowband.Axes(context=ranks))
    context = lowband.Context(topology)
    if left_out == "loss":  # a mean of an evaluation is none of the training's
        with torch.no_grad():
            context.mean(context.attention(*torch.zeros(3, 1, 2, TOKENS // ranks, 4)).sum(), torch.ones(1))
    inner = nn.Conv1d(1, 1, 3) if left_out == "neighbours" else nn.Identity()
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        layer = Layer(None if left_out == "attention" else context, inner)
        lowband.shard(layer, "zero3", topology, nn.Linear, compute_dtype=torch.float32)
        for _ in range(2):
            x = torch.randn(1, TOKENS, WIDTH)
            y = layer(x if left_out == "split" else context.split(x)).square()
            loss = y.mean() if left_out == "loss" else context.mean(y.sum(), torch.ones(y.shape[:2]))
            loss.backward()
            layer.zero_grad()
            with torch.no_grad():
                if left_out in ("nothing", "prompts"):
                    layer(x if left_out == "prompts" else context.split(x[:, :4]))
    return [str(each.message) for each in found if "lowband.Context" in str(each.message)]


def all_said(ranks: int) -> dict[str, list[str]]:
    torch.manual_seed(0)
    return {each: said(each, ranks) for each in ("nothing", *WARNED)}


WARNED = {
    "attention": "none of its attention was called",
    "split": "no tokens were split",
    "loss": "a loss that is no Context.mean is right only if",
    "prompts": "attention of 8 tokens on a rank, as no split gave",
    "neighbours": "'inner': Conv1d needs the tokens of a whole sequence",
}


def test_what_is_left_out_is_warned_of_once() -> None:
    for found in on_ranks(2, all_said, 2):
        assert found.pop("nothing") == []
        assert found.keys() == WARNED.keys()
        for left_out, [warned] in found.items():
            assert WARNED[left_out] in warned


def test_one_rank_has_all_tokens_and_hears_nothing() -> None:
    [quiet] = on_ranks(1, all_said, 1)
    assert not any(quiet.values())


def _of_copy() -> bool:
    layer = Layer(lowband.Context(lowband.Topology({}, lowband.Axes(context=2))), nn.Identity())
    x = torch.randn(1, TOKENS // 2, WIDTH)
    return torch.equal(deepcopy(layer)(x), layer(x))


def test_a_copy_of_a_module_attends_over_the_same_ranks() -> None:
    assert on_ranks(2, _of_copy) == [True, True]


def _of_chain() -> list[str]:
    topology = lowband.Topology({}, lowband.Axes(context=2))
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        lowband.Pipeline([nn.Linear(4, 4), nn.Conv1d(4, 4, 3)], F.mse_loss, "zero3", topology, 1)
    return [str(each.message) for each in found]


def test_a_chain_that_was_not_bound_is_warned_of() -> None:
    for told in on_ranks(2, _of_chain):
        assert [each[:46] for each in told] == ["lowband.Context: '1': Conv1d needs the tokens "]
