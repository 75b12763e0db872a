"""A running backward: the units in use, and the reductions of their gradients in one order on all ranks.

[Note: order] A unit is ready when its last parameter has its gradient. On a rank whose data do not reach all
of a unit's parameters, as with experts that tokens choose, that is never so, and its gradients are reduced at
the backward's end. If the others reduced that unit before, ranks would wait for each other. So a unit that is
ready waits for those before it, in an order that is the same on all ranks (`Engine.begin_backward`).
"""

import weakref
from collections import Counter, deque
from collections.abc import Callable, Sequence

import torch

from lowband.engine.shard import Unit

MOST_REDUCING = 2


class Backward:
    """The backward of one module, from its first gradient to the gradients of the shards.

    runs:   whether there is one
    in_use: units whose saved weights it has found to be right
    """

    def __init__(self, units: Sequence[Unit], at_boundary: Callable[[], bool]) -> None:
        """at_boundary: whether it ends an accumulation"""
        self._units, self._at_boundary = units, at_boundary
        self.runs = False
        self.in_use: set[Unit] = set()
        self._open: Counter[Unit] = Counter()  # calls of each unit whose backward has begun
        self._order: list[Unit] = []  # see [Note: order]
        self._left: deque[Unit] = deque()  # of these, units that are not being reduced
        self._ready: set[Unit] = set()
        self._reducing: deque[Unit] = deque()  # units whose reduction may still run, oldest first
        self._ending: Callable[[], object] = lambda: None  # the call at its end, while that exists

    def begin(self, order: list[Unit]) -> None:
        """order: of the units' reductions; frozen ones have none"""
        self.runs, self._order = True, [unit for unit in order if unit.requires_grad]
        self._left = deque(self._order)
        for unit in self._units:
            unit.grads.expect()

    def queue_end(self, call: Callable[[], None]) -> None:
        """Have autograd, which alone may hold it, call `call`. If the backward fails it is freed uncalled."""
        self._ending = weakref.ref(call)
        torch.autograd.Variable._execution_engine.queue_callback(call)  # type: ignore[attr-defined]

    def is_broken(self) -> bool:
        """Whether it has ended with an exception."""
        is_in_it = torch._C._current_graph_task_id() != -1 and self._ending() is not None
        return self.runs and not is_in_it

    # ---- calls of units

    def begin_call(self, unit: Unit) -> None:
        self._open[unit] += 1

    def end_call(self, unit: Unit) -> bool:
        """Whether no other call of the unit is open. In f(f(x)) the inner call's backward has begun by now.

        No call may be open: a side output's backward does not go through the unit's output.
        """
        self._open[unit] = max(0, self._open[unit] - 1)
        return not self._open[unit]

    # ---- reductions

    def ready(self, unit: Unit) -> None:
        """Its gradients are there: reduce what is next in the order."""
        unit.drop()
        self._ready.add(unit)
        while self._left and self._left[0] in self._ready:
            self.reduce(self._left.popleft())

    def reduce(self, unit: Unit) -> None:
        """Start a unit's reduction; at most two are pending, because each holds a unit's whole gradient."""
        if len(self._reducing) == MOST_REDUCING:
            self._reducing.popleft().grads.wait_reduce()
        unit.grads.start_reduce(at_boundary=self._at_boundary())
        self._reducing.append(unit)

    def end(self) -> None:
        """Reduce the units that are left: those with unused parameters or with late gradients."""
        for unit in self._order:
            if unit.grads.needs_reduce:
                self.reduce(unit)
        for unit in self._units:
            unit.drop()
        for unit in self._units:
            unit.grads.finish_reduce()
        self._forget()

    def discard(self) -> None:
        """Drop all units and, if it runs, its gradients."""
        for unit in self._units:
            unit.drop()
        if self.runs:
            for unit in self._units:
                unit.grads.forget()
        self._forget()

    def _forget(self) -> None:
        for each in (self.in_use, self._open, self._left, self._ready, self._reducing):
            each.clear()
        self.runs = False
