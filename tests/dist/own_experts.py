"""A model of a user's own whose blocks have layers of experts."""

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import lowband

H, WIDTH, EXPERTS = 8, 12, 4
BIAS = lowband.Routing(EXPERTS, 2, normalized=True, balance="bias")
ONE = lowband.Routing(EXPERTS, 1)


class Layer(nn.Module):
    """A residual block of a user's own. again: its forward is computed once more in the backward"""

    def __init__(self, routing: lowband.Routing, again: bool = False) -> None:
        super().__init__()
        self.norm, self.again = nn.LayerNorm(H), again
        self.mixture = lowband.MixtureOfExperts(H, WIDTH, routing, gated=True)

    def computed(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.mixture(self.norm(x))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.computed, x, use_reentrant=False) if self.again else self.computed(x)


def model_of(routing: lowband.Routing = BIAS) -> nn.Sequential:
    torch.manual_seed(4)
    return nn.Sequential(nn.Linear(H, H), Layer(routing), Layer(routing, again=True), nn.Linear(H, 3))
