"""`lowband.clip_grad_norm_` of gradients that have no norm: as torch's."""

import pytest
import torch
from torch import nn

import lowband
from lowband.run.on_ranks import on_ranks


class Net(nn.Module):
    """The gradient of one of its parameters is what `odd` is; those of the others are finite."""

    def __init__(self, odd: float) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.odd, self.layer, self.offset = odd, nn.Linear(3, 3), nn.Parameter(torch.ones(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.layer(x) + self.offset * self.odd).sum()


def stepped(model: nn.Module, clip, optimizer: torch.optim.Optimizer) -> float:
    model(torch.arange(6.0).view(2, 3)).backward()
    norm = float(clip(model.parameters(), 0.5))
    optimizer.step()
    return norm


def sharded(odd: float, fused: bool) -> tuple[float, dict[str, torch.Tensor]]:
    model = lowband.shard(Net(odd), "zero3", lowband.Topology({}), nn.Linear, torch.float32)
    optimizer = lowband.AdamW(model, 0.1) if fused else torch.optim.AdamW(model.parameters(), lr=0.1)
    clip = optimizer.clip_grad_norm_ if fused else lambda _, most: lowband.clip_grad_norm_(model, most)
    norm = stepped(model, (lambda _, most: clip(most)) if fused else clip, optimizer)
    return norm, lowband.full_state_dict(model)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("odd", [float("nan"), float("inf"), 1.0])
def test_a_norm_that_is_none_spreads_as_in_torch(odd: float, fused: bool) -> None:
    plain = Net(odd)
    norm = stepped(plain, nn.utils.clip_grad_norm_, torch.optim.AdamW(plain.parameters(), lr=0.1))
    found, state = on_ranks(2, sharded, odd, fused)[0]
    assert found == pytest.approx(norm, nan_ok=True)
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(state[name], value, equal_nan=True, rtol=1e-5, atol=1e-6)
