"""LAMB on shards: You et al., arXiv 1904.00962, algorithm 2, with norms over all ranks."""

from collections.abc import Callable, Iterable
from typing import Any

import torch

from lowband.engine.units.shard_parameter import ShardParameter
from lowband.engine.units.shard_sums import norms, part_of, step_begun


class Lamb(torch.optim.Optimizer):
    """Adam whose update of each parameter is scaled to the parameter's norm.

    params:       shards: `module.parameters()` after lowband.shard, or groups of them
    betas, eps:   of Adam's moments, with bias correction
    weight_decay: part of the update that is scaled

    The scale is 1 where either norm is 0. States are sharded as the parameters are; `lowband.Checkpointer`
    saves them. Every rank must step it at the same time. A step raises UserError for a parameter that is no
    shard.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.01,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """One step; returns what `closure` returns, which is called first, with gradients enabled."""
        loss, pairs = step_begun(self, closure)
        shards = [shard for _, shard in pairs]
        for group, shard in pairs:
            self._add_moments(group, shard)
        weights = norms(shards)
        updates = norms(shards, [self._update(group, shard) for group, shard in pairs])
        for (group, shard), weight, update in zip(pairs, weights, updates, strict=True):
            scale = torch.where((weight > 0) & (update > 0), weight / update, 1.0)
            part_of(shard).sub_(self._update(group, shard) * (group["lr"] * scale).float())
        return loss

    def _add_moments(self, group: dict[str, Any], shard: ShardParameter) -> None:
        state, (first, second) = self.state[shard], group["betas"]
        if not state:
            state["step"] = 0
            state["exp_avg"], state["exp_avg_sq"] = (torch.zeros_like(part_of(shard)) for _ in range(2))
        assert shard.grad is not None
        gradient = shard.grad.as_subclass(torch.Tensor)
        state["step"] += 1
        state["exp_avg"].lerp_(gradient, 1 - first)
        state["exp_avg_sq"].mul_(second).addcmul_(gradient, gradient, value=1 - second)

    def _update(self, group: dict[str, Any], shard: ShardParameter) -> torch.Tensor:
        """Adam's step and weight decay, before the learning rate, of this rank's part."""
        state, (first, second) = self.state[shard], group["betas"]
        mean = state["exp_avg"] / (1 - first ** state["step"])
        deviation = (state["exp_avg_sq"] / (1 - second ** state["step"])).sqrt_()
        return mean.div_(deviation.add_(group["eps"])).add_(part_of(shard), alpha=group["weight_decay"])
