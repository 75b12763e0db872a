"""Plans for sequence parallelism that leave tokens whole, or divide them twice."""

import warnings

import torch
from torch import nn

import lowband
from lowband.run.on_ranks import on_ranks
from lowband.spec.tensor import Column, Join, Plan, Row, Split, Tokens, Whole

WIDTH, TOKENS = 8, 8


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 16), nn.Linear(16, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.up(self.norm(x)).tanh())


class Net(nn.Module):
    """A block that is used several times, and a mean over what its head makes of the tokens."""

    def __init__(self, times: int) -> None:
        super().__init__()
        self.embed, self.block, self.head = nn.Linear(WIDTH, WIDTH), Block(), nn.Linear(WIDTH, 4)
        self.join, self.times = nn.Identity(), times

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for _ in range(self.times):
            x = self.block(x)
        return self.join(self.head(x)).square().mean()


PLAN: Plan = {
    "embed": Whole(), "block.norm": Tokens(), "block.up": Column(), "block.down": Row(), "head": Column(),
    "join": Join(),
}  # fmt: skip


def _told(plan: Plan, times: int, forwards: int = 3) -> list[str]:
    topology = lowband.Topology({}, lowband.Axes(tensor=2, sequence_parallel=True))
    torch.manual_seed(0)
    model = lowband.parallelize(Net(times), plan, topology)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        for of in range(forwards):
            model(torch.randn(2, TOKENS // (2 if of else 1), WIDTH)).backward()
    return [str(each.message).partition("parallel: ")[2] for each in found]


def _all_told() -> list[list[str]]:
    alike = torch.ones(2, TOKENS, WIDTH)
    topology = lowband.Topology({}, lowband.Axes(tensor=2, sequence_parallel=True))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        lowband.parallelize(Net(1), {**PLAN, "block": Split()}, topology)(alike)
    return [_told(PLAN, 1), _told({**PLAN, "block": Split()}, 2), _told({**PLAN, "block": Split()}, 1)]


def test_tokens_that_are_not_divided_once_are_warned_of_once() -> None:
    whole = "'block.up' was given the same tokens on all ranks: a Split says where they are divided"
    twice = "'block' divides the 4 tokens that it left: Split is for what is called once"
    assert on_ranks(2, _all_told) == [[[whole], [twice], []]] * 2
