"""A case in one process in plain torch that plays all ranks: the mean of their gradients, whole parameters.

The optimizer has fp32 masters; the module computes with their values in the case's dtype, and floating-point
inputs of the module and of its units are cast to it, as docs/library.md says of `compute_dtype`.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map

from tests.wide import huggingface
from tests.wide.cases import Case
from tests.wide.modules import DTYPE, batch_of, is_unit, loss_of, module_of
from tests.wide.observed import Observed
from tests.wide.optimizers import optimizer_of, schedule_of
from tests.wide.training import train

DECAY = 0.3  # of running averages


def run_plain(case: Case) -> list[Observed]:
    """What each rank should show."""
    torch.set_num_threads(1)
    side = Plain(case)
    train(case, side)
    return side.seen


class Plain:
    def __init__(self, case: Case) -> None:
        self.case, self.seen = case, [Observed() for _ in range(case.ranks)]
        self.module = module_of(case)
        self.leaves = dict(self.module.named_parameters())
        self.masters: dict[str, nn.Parameter] = {}
        for name, leaf in self.leaves.items():
            self.masters[name] = nn.Parameter(leaf.detach().float().clone(), leaf.requires_grad)
            leaf.data = leaf.data.to(DTYPE[case.dtype])
        for module in self.module.modules():
            if module is self.module or is_unit(case)(module):
                module.register_forward_pre_hook(self._cast, with_kwargs=True)
        self.buffers = [self._buffers() for _ in self.seen]
        self.optimizer = optimizer_of(case, self.masters.values(), is_sharded=False)
        self.schedule = schedule_of(case, self.optimizer)

    def _cast(self, _: nn.Module, args: Any, kwargs: Any) -> Any:
        def cast(value: Any) -> Any:
            is_float = isinstance(value, torch.Tensor) and value.is_floating_point()
            return value.to(DTYPE[self.case.dtype]) if is_float else value

        return tree_map(cast, args), tree_map(cast, kwargs)

    def _buffers(self) -> list[torch.Tensor]:
        return [buffer.clone() for buffer in self.module.buffers()]

    @contextmanager
    def _as(self, rank: int) -> Iterator[Observed]:
        """With this rank's buffers."""
        for buffer, value in zip(self.module.buffers(), self.buffers[rank], strict=True):
            buffer.copy_(value)
        yield self.seen[rank]
        self.buffers[rank] = self._buffers()

    def _take_over(self) -> None:
        for name, leaf in self.leaves.items():
            leaf.data.copy_(self.masters[name].detach())

    def backward(self, step: int) -> None:
        case = self.case
        for name, master in self.masters.items():
            master.grad = torch.zeros_like(master) if self.leaves[name].requires_grad else None
        for rank in range(case.ranks):
            for micro in range(case.micro_batches):
                torch.manual_seed(step * 1000 + micro * 100 + rank)
                with self._as(rank) as seen:
                    loss = loss_of(self.module, case, batch_of(case, step, micro, rank)) / case.micro_batches
                    seen.losses.append(loss.detach().clone())
                    loss.backward()
                for name, leaf in self.leaves.items():
                    if leaf.grad is not None:
                        self.masters[name].grad += leaf.grad.float() / case.ranks
                        leaf.grad = None

    def see_gradients(self) -> None:
        norms = {n: float(m.grad.double().norm()) for n, m in self.masters.items() if m.grad is not None}
        for seen in self.seen:
            seen.gradients.append(norms)

    def clip(self, max_norm: float) -> None:
        """To exactly the norm: torch adds 1e-6 to the divisor."""
        gradients = [m.grad for m in self.masters.values() if m.grad is not None]
        norm = float(sum(g.double().square().sum() for g in gradients) ** 0.5)
        for gradient in gradients:
            gradient.mul_(min(1.0, max_norm / norm))
        for seen in self.seen:
            seen.clipped.append(norm)

    def step(self) -> None:
        self.optimizer.step()
        if self.schedule is not None:
            self.schedule.step()
        self._take_over()

    def evaluate(self, step: int) -> None:
        self.module.eval()
        with torch.no_grad():
            for rank in range(self.case.ranks):
                with self._as(rank) as seen:
                    loss = loss_of(self.module, self.case, batch_of(self.case, step, 7, rank))
                    seen.losses.append(loss.clone())
        self.module.train()

    def generate(self, step: int) -> None:
        self.module.eval()
        for rank, seen in enumerate(self.seen):
            tokens = batch_of(self.case, step, 8, rank)["input_ids"]
            seen.tokens.append(huggingface.generated(self.module, self.case, tokens))
        self.module.train()

    def average(self, start: bool) -> None:
        if start:
            self.averages = {name: master.detach().clone() for name, master in self.masters.items()}
        for name, average in self.averages.items():
            average.lerp_(self.masters[name].detach(), DECAY)

    def take_average(self) -> None:
        with torch.no_grad():
            for name, average in self.averages.items():
                self.masters[name].copy_(average)
        self._take_over()

    def resume(self) -> None:
        """Resuming changes nothing but that all ranks have rank 0's buffers."""
        self.buffers = [self.buffers[0]] * len(self.seen)

    def see_state(self) -> None:
        """By every name that a weight has; it may have several."""
        names = {leaf: name for name, leaf in self.leaves.items()}
        with self._as(0):
            state = {name: value.detach().clone() for name, value in self.module.state_dict().items()}
        for name, leaf in self.module.named_parameters(remove_duplicate=False):
            state[name] = self.masters[names[leaf]].detach().clone()
        self.seen[0].states.append(state)
