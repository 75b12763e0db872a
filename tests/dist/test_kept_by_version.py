"""What a module makes of a weight and keeps until the weight's version changes, as torch's own caches do."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

import lowband
from lowband.run.on_ranks import on_ranks
from tests.checkout import CONFIG


class Keeping(nn.Linear):
    def __init__(self) -> None:
        super().__init__(8, 8)
        self.at, self.made = -1, 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.at != self.weight._version:
            self.at, self.kept = self.weight._version, self.weight.detach().tanh()
            self.made += 1
        return x @ self.kept.T + super().forward(x)


def trained(scheme: str, writes_copy: bool = False) -> tuple[list[float], int]:
    """Losses of steps of two forwards each, of which one is without gradients; how often it was made.

    writes_copy: whether the optimizer writes the copy in 16 bits, too
    """
    torch.manual_seed(0)
    module = nn.Sequential(Keeping(), nn.Linear(8, 8))
    if scheme:
        inner = {"package": 1, "node": 2} if dist.get_world_size() > 1 else {"package": 1, "node": 1}
        topology = lowband.Topology(inner)
        dtype = torch.bfloat16 if writes_copy else torch.float32
        lowband.shard(module, CONFIG.scheme(scheme), topology, Keeping, dtype)
    optimizer: torch.optim.Optimizer = torch.optim.SGD(module.parameters(), lr=0.5)
    if writes_copy:
        optimizer = lowband.AdamW(module, lr=0.1)
    losses = []
    for _ in range(3):
        with torch.no_grad():
            module(torch.ones(2, 8))
        loss = module(torch.ones(2, 8)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, module[0].made


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("scheme", ["ddp", "zero1", "zero3", "hier3-exact"])
def test_it_is_made_anew_behind_each_step_and_only_then(scheme: str, ranks: int) -> None:
    [(expected, _)] = on_ranks(1, trained, "")
    for losses, made in on_ranks(ranks, trained, scheme):
        assert losses == pytest.approx(expected, rel=1e-5)
        assert made == 3


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("scheme", ["ddp", "zero1", "zero3"])
def test_a_copy_that_the_optimizer_wrote_is_a_change(scheme: str, ranks: int) -> None:
    assert [made for _, made in on_ranks(ranks, trained, scheme, True)] == [3] * ranks
