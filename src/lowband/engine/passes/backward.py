"""A running backward: the units in use, and the reductions of their gradients in one order on all ranks.

[Note: order] A unit is ready when the last of its parameters that this backward reaches has its gradient, and
a bucket when its units are. A gate, or all of a unit, that the data of some ranks leave out must not put off
its reduction behind the next gather: ranks would wait for each other. So which are reached is asked when the
next unit's backward begins; before, few are still missing. Where it cannot be known (passes.hooks, [Note:
late gradients]), or where a rank's data go around a unit, as with experts that tokens choose, gradients are
reduced at the backward's end. Others may have them before: so a bucket that is ready waits for those before
it, in an order that is the same on all ranks (`Passes.begin_backward`).
"""

import weakref
from collections import Counter, deque
from collections.abc import Callable, Sequence

import torch

from lowband.engine.collectives.activations import Along
from lowband.engine.units.bucket import Bucket
from lowband.engine.units.unit import Unit
from lowband.spec.activations import SHARED_REDUCE

MOST_REDUCING = 2


class Backward:
    """The backward of one module, from its first gradient to the gradients of the shards.

    runs:   whether there is one
    in_use: units whose saved weights it has found to be right
    sum_tied: adds other stages' gradients to those of units that they have, too (parallel.tied)
    compare: those that all tensor ranks are to have, by name (passes.alike); None if there are no others
    """

    def __init__(
        self,
        units: Sequence[Unit],
        buckets: Sequence[Bucket],
        at_boundary: Callable[[], bool],
        tensor: Along | None,
    ) -> None:
        """at_boundary: whether it ends an accumulation; tensor: the axis over which partial sums are added"""
        self._units, self._buckets, self._at_boundary = units, buckets, at_boundary
        self._tensor, self._device = tensor, units[0].collectives.device
        self._bucket_of = {unit: bucket for bucket in buckets for unit in bucket.units}
        self.runs = False
        self.are_taken = False  # gradients by lowband.Matrices, since it ended
        self.in_use: set[Unit] = set()
        self.sum_tied: Callable[[list[tuple[Unit, torch.Tensor]]], None] = lambda _: None
        self.compare: Callable[[list[tuple[str, torch.Tensor]]], None] | None = None
        self._open: Counter[Unit] = Counter()  # calls of each unit whose backward has begun
        self._task = -1  # autograd's graph task in which it began
        self._begun: list[Unit] = []  # units whose backward has begun since the last gather
        self._order: list[Bucket] = []  # see [Note: order]
        self._left: deque[Bucket] = deque()  # of these, those that are not being reduced
        self._ready: set[Unit] = set()
        self._reducing: deque[Bucket] = deque()  # those whose reduction may still run, oldest first
        self._ending: Callable[[], object] = lambda: None  # the call at its end, while that exists

    def begin(self, order: list[Unit]) -> None:
        """order: in which units become ready; frozen ones do not"""
        self.runs, self._task = True, torch._C._current_graph_task_id()
        last_first = (self._bucket_of[unit] for unit in reversed(order) if unit.requires_grad)
        self._order = list(dict.fromkeys(last_first))[::-1]
        self._left = deque(self._order)
        for unit in self._units:
            unit.grads.expect()
        for bucket in self._buckets:
            bucket.expect()

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

    def expect(self, unit: Unit, may_be_whole: bool) -> None:
        """Expect all gradients of a unit in the running graph task.

        may_be_whole: whether that task, if the backward began in it, is known to be all of it
        """
        task = torch._C._current_graph_task_id()
        unit.grads.expect_ready(task)
        if may_be_whole and task == self._task and unit.requires_grad:
            self._begun.append(unit)

    def forgo_unreached(self) -> None:
        """Before more weights are gathered, see [Note: order]."""
        if torch._C._current_graph_task_id() != self._task:
            return
        begun, self._begun = self._begun, []
        for unit in begun:
            unit.grads.forgo_unreached()

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
        if unit.requires_grad:
            self._bucket_of[unit].add(unit)
        self._ready.add(unit)
        while self._left and self._ready.issuperset(self._left[0].units):
            self._reduce(self._left.popleft())

    def _reduce(self, bucket: Bucket) -> None:
        """Start a reduction; at most two are pending, because each holds whole gradients."""
        if len(self._reducing) == MOST_REDUCING:
            self._reducing.popleft().wait_reduce()
        bucket.start_reduce(at_boundary=self._at_boundary())
        self._reducing.append(bucket)

    def end(self) -> None:
        """Reduce the buckets that are left: those with unused parameters or with late gradients."""
        for bucket in self._order:
            if bucket.needs_reduce:
                self._reduce(bucket)
        for unit in self._units:
            unit.drop()
        for bucket in self._buckets:
            bucket.wait_reduce()
        for bucket in self._buckets:
            bucket.settle()
        self._sum_partial([part for bucket in self._buckets for part in bucket.partial_sums])
        if self.compare is not None:
            self.compare([each for bucket in self._buckets for each in bucket.alike_parts])
        self.sum_tied([each for bucket in self._buckets for each in bucket.tied_parts])
        for bucket in self._buckets:
            bucket.finish_reduce()
        self.are_taken = False
        self._forget()

    def _sum_partial(self, parts: list[torch.Tensor]) -> None:
        """Add partial sums over the tensor axis, in place: see parallel.tensor, [Note: shared]."""
        if not parts or self._tensor is None:
            return
        summed = self._tensor.summed(torch.cat(parts).to(self._device), SHARED_REDUCE, "shared")
        for part, total in zip(parts, summed.split([part.numel() for part in parts]), strict=True):
            part.copy_(total)

    def discard(self) -> None:
        """It broke: drop all units and, if it runs, its gradients and those that wait."""
        for unit in self._units:
            unit.drop()
        if self.runs:
            for bucket in self._buckets:
                bucket.waiting.end(is_broken=True)
            self.forget_gradients()
        self._forget()

    def forget_gradients(self) -> None:
        """Discard all gradients that the optimizer's parameters do not have yet."""
        for bucket in self._buckets:
            bucket.forget()

    def _forget(self) -> None:
        for each in (self.in_use, self._open, self._begun, self._left, self._ready, self._reducing):
            each.clear()
        self.runs = False
