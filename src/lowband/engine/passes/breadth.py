"""Breadth-first gradient accumulation: each unit computes all micro-batches in turn.

Forward, per unit:   gather (the next unit's gather runs behind the computation), compute every micro-batch,
                     keep the secondary shard if the scheme has one, drop.
At the loss:         forward and backward of what follows the last unit, one micro-batch at a time, so that
                     only one has its logits in memory.
Backward, per unit:  gather, compute every micro-batch, drop, reduce the sum of the gradients.

So an optimizer step gathers a unit once per direction and reduces its gradient once, however many
micro-batches it has; the price is the activations of all of them. Source: Lamy-Poirier, arXiv 2211.05953,
with one pipeline stage.

[Note: turns] Each micro-batch's forward is a coroutine that is suspended after each unit's computation. So
activation checkpointing around a unit saves the state of the random generators right before the unit draws
from them. (The order of draws differs from depth-first order: with dropout, so do the values.)

[Note: cuts] The graph is cut behind each unit: what follows gets the unit's outputs as leaves, whose
gradients start the unit's backward. Nothing waits inside of autograd, which on a GPU runs all backward passes
in one thread. The cuts need a chain: a tensor that requires gradients and enters a unit is an output of an
earlier unit. What comes before the first unit belongs to that unit's graph. Side outputs, tensors that a
forward keeps in attributes of modules, are cut with the outputs of the unit that computes then or next.

[Note: attributes] All micro-batches use the same modules, so each finds the attributes that its own forward
has set whenever it goes on.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Generic, TypeVar

import torch
from torch import nn

from lowband.engine.passes.attributes import Attributes
from lowband.engine.passes.coroutine import Coroutine
from lowband.engine.passes.forward_pass import Pass
from lowband.engine.passes.nested import replaced, requiring_grad
from lowband.engine.passes.passes import Passes
from lowband.engine.units.unit import Unit
from lowband.errors import UserError

T = TypeVar("T")

CHAIN = "a module that is a chain of its units"


class _Cut:
    """A unit's outputs that require gradients, and the leaves that what follows gets instead."""

    def __init__(self) -> None:
        self._outputs: list[torch.Tensor] = []
        self.leaves: list[torch.Tensor] = []
        self._leaf_of: dict[int, torch.Tensor] = {}  # by the id of an output

    def through(self, values: Any) -> Any:
        """Nested values, with leaves in place of the tensors that require gradients."""
        return replaced(values, self._leaf)

    def _leaf(self, output: torch.Tensor) -> torch.Tensor:
        if not output.requires_grad or isinstance(output, nn.Parameter):  # an RNN's forward lists its weights
            return output
        if id(output) not in self._leaf_of:
            self._leaf_of[id(output)] = output.detach().requires_grad_()
            self._outputs.append(output)
            self.leaves.append(self._leaf_of[id(output)])
        return self._leaf_of[id(output)]

    def backward(self) -> None:
        """Backward through the unit, from the gradients of the leaves."""
        pairs = [(o, leaf.grad) for o, leaf in zip(self._outputs, self.leaves, strict=True)]
        pairs = [(output, grad) for output, grad in pairs if grad is not None]
        self._outputs, self.leaves, self._leaf_of = [], [], {}
        if pairs:
            outputs, grads = zip(*pairs, strict=True)
            with _without_autocast(outputs[0]):
                torch.autograd.backward(outputs, grads)


def _without_autocast(tensor: torch.Tensor) -> torch.autocast:
    """The caller's is of forwards, as around a loop that calls `backward` outside of it."""
    return torch.autocast(tensor.device.type, enabled=False)


class _MicroBatch:
    """One micro-batch on its way through the units."""

    def __init__(self, loss_of: Callable[[], torch.Tensor]) -> None:
        self.forward = Coroutine(loss_of)
        self.cuts: list[_Cut] = []  # by unit
        self.leaves: set[int] = set()  # ids of the cuts' leaves
        self.has_begun = False  # the module's forward
        self.inside: nn.Module | None = None  # owner of the unit that computes
        self.passed: nn.Module | None = None  # owner of the last unit that has computed
        self.attributes = Attributes()  # that its forward has set


class Breadth(Generic[T]):
    """The accumulation of one step, or of a part of it under `no_sync`."""

    def __init__(
        self, passes: Passes, micro_batches: Sequence[T], loss_of: Callable[[T], torch.Tensor]
    ) -> None:
        """See `lowband.accumulate`."""
        self._passes = passes
        self._micro_batches = [_MicroBatch(partial(loss_of, each)) for each in micro_batches]
        self._running: _MicroBatch | None = None
        self._pass = Pass(trains=True)  # of the first micro-batch, as an example of all
        self._owners: list[nn.Module] = []  # of the units that all micro-batches have passed
        self._before_units: set[Any] = set()  # nodes of the first micro-batch's graph before the first unit
        self._modules = list(passes.module.modules())

    def run(self) -> list[torch.Tensor]:
        """All forward and backward passes; returns the losses."""
        with self._passes.led_by(self):
            try:
                while self._through_next_unit():
                    pass
                self._passes.forward_order = self._pass.begun
                self._passes.begin_backward()
                losses = self._at_loss()
                self._backward()
                self._passes.end_backward()
                return losses
            finally:
                for each in self._micro_batches:
                    each.forward.close()

    # ---- forward

    def _through_next_unit(self) -> bool:
        """Take every micro-batch through the next unit; False if there is none: the first one has ended."""
        first, *others = self._micro_batches
        if not self._resume(first):
            return False
        owner = first.passed
        assert owner is not None
        for each in others:
            if not self._resume(each) or each.passed is not owner:
                raise _refusal(self._name(owner), "not every micro-batch goes through it at the same place")
        for unit in self._passes.units_of[owner]:
            unit.keep_secondary()
            unit.drop()
        self._owners.append(owner)
        return True

    def _resume(self, micro_batch: _MicroBatch) -> bool:
        """Run its forward until it has passed the next unit (True) or has ended (False)."""
        self._running = micro_batch
        micro_batch.attributes.put()
        micro_batch.attributes.watch(self._modules)
        try:
            return micro_batch.forward.resume()
        finally:
            self._running = None

    @property
    def runs_here(self) -> bool:
        """Whether the calling code belongs to the forward of a micro-batch."""
        return self._running is not None and self._running.forward.runs_here

    def before_forward(self, owner: nn.Module, inputs: Any) -> None:
        """The engine's hook, inside of a micro-batch's forward: check the chain, gather the unit."""
        passes, micro_batch = self._passes, self._running
        assert micro_batch is not None
        if owner is passes.module:
            if micro_batch.has_begun:
                raise _refusal(type(owner).__name__, "loss_of calls the module more than once")
            micro_batch.has_begun = True
        else:
            self._check_chain(owner, requiring_grad(inputs), micro_batch)
            micro_batch.inside = owner
        passes.gather(passes.units_of.get(owner, []), backward=False)
        if micro_batch is self._micro_batches[0]:
            self._pass.begun.append(owner)
            passes.prefetch(self._pass.after(owner, passes.forward_order), backward=False)

    def after_forward(self, owner: nn.Module, output: Any) -> Any:
        """The engine's hook: cut the graph behind a unit, and wait until all micro-batches have got here."""
        micro_batch = self._running
        assert micro_batch is not None
        if owner is self._passes.module:
            return None
        cut = _Cut()
        output = cut.through(output)
        micro_batch.attributes.take(cut.through)
        micro_batch.cuts.append(cut)
        micro_batch.leaves.update(map(id, cut.leaves))
        micro_batch.inside, micro_batch.passed = None, owner
        micro_batch.forward.suspend()
        return output

    def _check_chain(self, owner: nn.Module, inputs: list[torch.Tensor], micro_batch: _MicroBatch) -> None:
        units, name = self._passes.units_of[owner], self._name(owner)
        if micro_batch.inside is not None:
            raise _refusal(name, f"it runs inside of unit '{self._name(micro_batch.inside)}'")
        if not torch.is_grad_enabled() and (inputs or any(unit.requires_grad for unit in units)):
            raise _refusal(
                name, "it runs without gradients, as under reentrant checkpointing", "use_reentrant=False"
            )
        if not micro_batch.cuts:
            if micro_batch is self._micro_batches[0]:
                self._before_units, _ = _graph(inputs)
        elif not all(id(tensor) in micro_batch.leaves for tensor in inputs):
            raise _refusal(name, "it takes a tensor with a gradient that is not an earlier unit's output")

    def _name(self, owner: nn.Module) -> str:
        return self._passes.units_of[owner][0].name

    # ---- forward and backward

    def _at_loss(self) -> list[torch.Tensor]:
        """Compute what follows the last unit, and its backward; returns the losses, detached."""
        passes, losses = self._passes, []
        last = self._owners[-1] if self._owners else None
        kept = [*passes.units_of.get(passes.module, []), *(passes.units_of[last] if last else [])]
        passes.prefetch(last, backward=True)
        for i, each in enumerate(self._micro_batches):
            if i and self._resume(each):
                assert each.passed is not None
                raise _refusal(self._name(each.passed), "not every micro-batch goes through it")
            loss = each.forward.take_result()
            if not isinstance(loss, torch.Tensor) or loss.numel() != 1 or not loss.requires_grad:
                raise UserError("loss_of returns no loss", allowed="one number that requires gradients")
            self._check_loss(loss, each)
            self._before_units = set()
            losses.append(loss.detach())
            with _without_autocast(loss):
                loss.backward()
            del loss
            self._sum_grads(passes.units)  # the loss may use side outputs that no attribute holds
            for unit in passes.units:
                if unit not in kept:
                    unit.drop()
        return losses

    def _check_loss(self, loss: torch.Tensor, micro_batch: _MicroBatch) -> None:
        nodes, leaves = _graph([loss])
        if not self._before_units.isdisjoint(nodes):
            raise UserError(
                "breadth-first: the loss uses a tensor from before the first unit, or that a hook has kept",
                allowed=f"{CHAIN}; side losses in attributes of modules; lowband.no_sync",
            )
        if any(leaves & each.leaves for each in self._micro_batches if each is not micro_batch):
            raise UserError(
                "breadth-first: the loss uses a tensor of another micro-batch",
                allowed="side losses in attributes of modules that each forward sets anew",
            )

    # ---- backward

    def _backward(self) -> None:
        """Backward through every unit, and through what comes before the first."""
        passes = self._passes
        root = passes.units_of.get(passes.module, [])
        left = [i for i, _ in enumerate(self._owners) if any(m.cuts[i].leaves for m in self._micro_batches)]
        while left:
            i = left.pop()
            units = passes.units_of[self._owners[i]]
            passes.gather(units, backward=True)
            passes.prefetch(self._owners[left[-1]] if left else None, backward=True)
            for each in self._micro_batches:
                each.cuts[i].backward()
                self._sum_grads([*units, *root])
            is_over = all(self._owners[k] is not self._owners[i] for k in left)
            for unit in units:
                unit.drop()
                if is_over:
                    passes.ready(unit)

    def _sum_grads(self, units: list[Unit]) -> None:
        if len(self._micro_batches) > 1:
            for unit in units:
                unit.grads.add_to_sum()


def _refusal(unit: str, reason: str, allowed: str = CHAIN) -> UserError:
    return UserError(f"breadth-first: {reason}", where=f"unit '{unit}'", allowed=allowed)


def _graph(tensors: Sequence[torch.Tensor]) -> tuple[set[Any], set[int]]:
    """The graph behind tensors: its nodes, without those that lead to leaves, and the ids of its leaves."""
    found: set[Any] = set()
    leaves: set[int] = set()
    left = [tensor.grad_fn for tensor in tensors]
    while left:
        node = left.pop()
        if node is not None and not node.next_functions:
            leaves.add(id(getattr(node, "variable", None)))
        elif node is not None and node not in found:
            found.add(node)
            left += [function for function, _ in node.next_functions]
    return found, leaves
