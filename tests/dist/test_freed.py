"""A sharded module is freed once nobody has it: another one, in the same process, needs its memory."""

import gc
import weakref

import pytest
import torch
from torch import nn

import lowband
from lowband.run.on_ranks import on_ranks
from tests.checkout import CONFIG


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.linear(x)


def left_after_each(scheme: str) -> list[list[str]]:
    gc.freeze()  # all that was imported, through which each collection would go
    return [left_after(scheme, steps) for steps in (0, 2)]


def left_after(scheme: str, steps: int) -> list[str]:
    """Names of the modules, shards and optimizers that are left of a training."""
    module = lowband.shard(
        nn.Sequential(Block(), Block()),
        CONFIG.scheme(scheme),
        lowband.Topology({"package": 1, "node": 2}),
        Block,
        torch.float32,
    )
    optimizer = torch.optim.AdamW(module.parameters())
    for _ in range(steps):
        module(torch.ones(2, 16)).sum().backward()
        lowband.clip_grad_norm_(module, 1.0)
        optimizer.step()
        optimizer.zero_grad()
    parts = {f"module {name}": part for name, part in module.named_modules()}
    parts |= {f"shard {name}": shard for name, shard in module.named_parameters()}
    seen = {name: weakref.ref(part) for name, part in {**parts, "optimizer": optimizer}.items()}
    del module, optimizer, parts
    gc.collect()
    return [name for name, part in seen.items() if part() is not None]


@pytest.mark.parametrize("scheme", ["ddp", "zero1-host", "zero3", "hier3", "diloco"])
def test_nothing_is_left(scheme: str) -> None:
    assert on_ranks(2, left_after_each, scheme) == [[[], []], [[], []]]
