"""Hooks that a module had before it was sharded."""

import torch
from torch import nn

import lowband
from lowband.run.on_ranks import on_ranks


def _seen_before_a_forward() -> list[torch.Tensor]:
    """The weight that a layer's own hook sees, and the layer's weight."""
    torch.manual_seed(2)
    model = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 2))
    whole, seen = model[1].weight.detach().clone(), []
    model[1].register_forward_pre_hook(lambda layer, _: seen.append(layer.weight.detach().clone()))
    lowband.shard(model, "zero3", lowband.Topology({}), nn.Linear, compute_dtype=torch.float32)
    model(torch.ones(1, 3))
    return [*seen, whole]


def test_a_hook_of_the_modules_own_sees_whole_weights() -> None:
    for seen, whole in on_ranks(2, _seen_before_a_forward):
        assert torch.equal(seen, whole)
