"""One step of a pipeline on one rank: its list of actions, one after the other.

Weights:    a stage's units are gathered where the list comes to it, one ahead of the computation, and dropped
            where the list leaves it for another stage. So with one stage on a rank they are gathered once per
            step, and in breadth-first order once per direction. Parameters that several modules share stay
            for the whole step.
Gradients:  summed over the micro-batches in fp32, unit by unit, and reduced once per step: behind the rest of
            the list, when it has come to the stage's last backward.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import register_multi_grad_hook

from lowband.engine.parallel.deferred import Deferred, Deferring
from lowband.engine.parallel.kept_graphs import KeptGraphs, leaves_beside
from lowband.engine.parallel.mail import Mail
from lowband.engine.parallel.plan import Plan
from lowband.engine.passes.nested import differentiable, requiring_grad
from lowband.engine.passes.passes import Passes
from lowband.engine.units.gradients import is_hooked
from lowband.engine.units.states import UnitState
from lowband.engine.units.unit import Unit
from lowband.errors import UserError
from lowband.spec.schedule import Action

Place = tuple[int, int]  # stage and micro-batch


class _Received(torch.autograd.Function):
    """What a stage computes with in place of a leaf, which a module could not change in place."""

    @staticmethod
    def forward(ctx: Any, leaf: torch.Tensor, kept: KeptGraphs | None) -> torch.Tensor:
        if kept is not None:
            kept.watch(ctx)
        return leaf.detach()  # of the same memory and version: changes are found by whoever has kept it

    @staticmethod
    def backward(_ctx: Any, grad: torch.Tensor) -> Any:
        return grad, None


class Executor:
    """A step, of which the engine's hooks leave the stages' forwards to this."""

    runs_here = False  # whether a stage's forward runs

    def __init__(
        self,
        passes: Passes,
        plan: Plan,
        mail: Mail,
        modules: Mapping[int, Sequence[nn.Module]],
        deferring: Deferring,
        loss: Callable[[Any, Any], torch.Tensor],
        micro_batches: Sequence[tuple[Any, Any]],
    ) -> None:
        """modules: by stage, in order; micro_batches: input and target, of which ranks between use neither"""
        self._passes, self._plan, self._mail, self._modules = passes, plan, mail, modules
        self._deferring, self._loss, self._micro_batches = deferring, loss, micro_batches
        self._trains = torch.is_grad_enabled()
        self._actions = [each for each in plan.actions if self._trains or each.kind == "forward"]
        self._root = passes.units_of.get(passes.module, [])
        self._units = {
            stage: [unit for module in of_it for unit in passes.units_of.get(module, ())]
            for stage, of_it in modules.items()
        }
        self._leaves = {id(leaf) for unit in passes.units for leaf in unit.leaves}
        self._fresh: set[Unit] = set()  # gathered by a forward, before its end
        self._running: Sequence[nn.Module] = ()  # modules of the stage that computes
        self._inputs: dict[Place, tuple[torch.Tensor, ...]] = {}
        self._outputs: dict[Place, list[torch.Tensor]] = {}
        self._deferred: dict[Place, Deferred] = {}
        self._kept = KeptGraphs() if self._trains and mail.trained == 1 else None  # in the first step
        self._losses: dict[int, torch.Tensor] = {}  # by micro-batch
        self.ends: list[tuple[Action, float]] = []  # of what has run, by time.perf_counter()

    def run(self) -> list[torch.Tensor]:
        """The losses, detached, where the last stage is; elsewhere none."""
        passes, do = (
            self._passes,
            {
                "forward": self._forward,
                "backward": self._backward,
                "input": self._backward,
                "weight": self._weight,
            },
        )
        with passes.led_by(self):
            if self._trains:
                passes.forward_order = [module for of_it in self._modules.values() for module in of_it]
                passes.begin_backward()
            passes.gather(self._root, backward=False)
            for k, action in enumerate(self._actions):
                self._mail.post(action)
                following = next(iter(self._actions[k + 1 : k + 2]), None)
                if following is not None:
                    self._mail.post_early(following)
                    self._prefetch(following, action.stage)
                self._running = self._modules[action.stage]
                do[action.kind](action.stage, action.micro_batch)
                self.ends.append((action, time.perf_counter()))
                if self._trains and k in self._plan.ends:
                    self._reduce(action.stage)
                if following is None or following.stage != action.stage:
                    for unit in self._units[action.stage]:
                        unit.drop()
            self._mail.end()
            if self._kept is not None:
                self._kept.check()
            for unit in self._root:
                unit.drop()
            if self._trains:
                passes.end_backward()
        return [self._losses[i] for i in sorted(self._losses)]

    # ---- actions

    def _forward(self, stage: int, micro_batch: int) -> None:
        place, mail = (stage, micro_batch), self._mail
        if stage == 0:
            value, _ = self._micro_batches[micro_batch]
        else:
            self._inputs[place] = mail.take_output(stage, micro_batch)
            kept = None if stage == self._plan.last else self._kept
            value = tuple(_Received.apply(each, kept) for each in self._inputs[place])
        if self._trains and place in self._plan.split:
            self._deferred[place] = Deferred(self._may_be_late)
        self.runs_here = True
        try:
            with self._deferring.into(self._deferred.get(place)):
                for k, module in enumerate(self._running):
                    value = module(*value) if isinstance(value, tuple) else module(value)
                    if stage == k == 0 < self._plan.last and self._kept is not None:
                        value = self._kept.watched(value)
        finally:
            self.runs_here = False
        if stage < self._plan.last:
            outputs = mail.give_output(stage, micro_batch, value)
        else:
            outputs = [self._loss_of(value, micro_batch)]
            self._check_reach(outputs[0], value, place)
        if self._trains:
            self._outputs[place] = outputs
        else:
            self._inputs.pop(place, None)

    def _may_be_late(self, tensor: torch.Tensor) -> bool:
        """Whether it is a parameter whose gradient only the engine awaits."""
        return id(tensor) in self._leaves and not is_hooked(tensor)

    def _loss_of(self, output: Any, micro_batch: int) -> torch.Tensor:
        loss = self._loss(output, self._micro_batches[micro_batch][1])
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1 or loss.requires_grad != self._trains:
            raise UserError(
                "a pipeline's loss is no loss", allowed="one number that requires gradients, unless disabled"
            )
        self._losses[micro_batch] = loss.detach()
        return loss

    def _check_reach(self, loss: torch.Tensor, output: Any, place: Place) -> None:
        """Raises UserError for a loss that takes more than its stage computes for its micro-batch."""
        if not self._trains:
            return
        own = {id(leaf) for unit in (*self._units[place[0]], *self._root) for leaf in unit.leaves}
        others = {id(leaf) for at, leaves in self._inputs.items() if at != place for leaf in leaves}
        for leaf in leaves_beside(loss, requiring_grad(output)):
            if id(leaf) in others or (isinstance(leaf, nn.Parameter) and id(leaf) not in own):
                raise UserError(
                    "the loss takes what its stage does not compute for this micro-batch, such as weights or "
                    "side losses of other stages",
                    where="a pipeline",
                    allowed="what the last module returns; hand side losses on with the stages' outputs",
                )

    def _backward(self, stage: int, micro_batch: int) -> None:
        """Whole; or, if linear layers defer theirs, all but the gradients of their weights."""
        place = stage, micro_batch
        outputs = self._outputs.pop(place)
        is_last = stage == self._plan.last
        grads = None if is_last else self._mail.take_grads(stage, micro_batch)
        if outputs:
            with self._plainly(), self._deferring.into(self._deferred.get(place)):
                torch.autograd.backward(outputs, grads)
        del outputs
        if stage > 0:
            leaves = [leaf for leaf in self._inputs.pop(place) if leaf.requires_grad]
            found = [torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for leaf in leaves]
            self._mail.give_grads(stage, micro_batch, found)
        self._sum_grads(stage)

    def _weight(self, stage: int, micro_batch: int) -> None:
        with self._plainly():
            self._deferred.pop((stage, micro_batch)).run()
        self._sum_grads(stage)

    def _plainly(self) -> torch.autocast:
        """The caller's autocast is of forwards, as around a loop that calls `backward` outside of it."""
        return torch.autocast(self._passes.units[0].collectives.device.type, enabled=False)

    # ---- gradients

    def _sum_grads(self, stage: int) -> None:
        if len(self._micro_batches) > 1:
            for unit in (*self._units[stage], *self._root):
                unit.grads.add_to_sum()

    def _reduce(self, stage: int) -> None:
        """The gradients of a stage are complete; those of the root when the step ends."""
        for unit in reversed(self._units[stage]):
            self._passes.ready(unit)

    # ---- weights

    def _prefetch(self, following: Action, stage: int) -> None:
        """Start the first gather of the next action if it is of another stage."""
        if following.stage != stage and following.kind != "weight":
            modules, is_forward = self._modules[following.stage], following.kind == "forward"
            self._passes.prefetch(modules[0 if is_forward else -1], backward=not is_forward)

    def before_forward(self, owner: nn.Module, _inputs: Any) -> None:
        """The engine's hook, before a module of the chain computes."""
        units = self._passes.units_of.get(owner, [])
        self._fresh.update(unit for unit in units if unit.state is not UnitState.GATHERED)
        self._passes.gather(units, backward=False)
        self._passes.prefetch(self._beside(owner, 1), backward=False)

    def after_forward(self, owner: nn.Module, output: Any) -> Any:
        """The engine's hook, after it has computed."""
        for unit in self._passes.units_of.get(owner, []):
            if unit in self._fresh:
                unit.keep_secondary()
                self._fresh.discard(unit)
        tensors = [tensor for tensor in differentiable(output) if not tensor.is_leaf]
        if tensors:
            register_multi_grad_hook(tensors, lambda _: self._before_backward(owner), mode="any")
        return None

    def _before_backward(self, owner: nn.Module) -> None:
        self._passes.gather(self._passes.units_of.get(owner, []), backward=True)
        self._passes.prefetch(self._beside(owner, -1), backward=True)

    def _beside(self, owner: nn.Module, distance: int) -> nn.Module | None:
        """The module before or after one in the stage that computes."""
        places = [i for i, module in enumerate(self._running) if module is owner]
        if not places:
            raise UserError(
                "a stage takes what another stage of its rank has computed, and was not handed on",
                where="a pipeline",
                allowed="what stages return and are given",
            )
        at = places[0] + distance
        return self._running[at] if 0 <= at < len(self._running) else None
