"""What every order of a module's passes is made of: gathers, prefetches, a backward's begin and end.

Three orders are made of it: one micro-batch after the other (passes.hooks), unit by unit (passes.breadth) and
a pipeline's list of actions (parallel.executor). In the latter two the hooks leave each micro-batch's forward
to who leads.
"""

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import nn

from lowband.engine.backend import backend
from lowband.engine.collectives.activations import Along
from lowband.engine.passes.backward import Backward
from lowband.engine.passes.forward_pass import MicroBatches
from lowband.engine.transport.axis import Axis
from lowband.engine.units.behind import before_backward
from lowband.engine.units.bucket import collect
from lowband.engine.units.copied import raised_here
from lowband.engine.units.unit import Unit
from lowband.errors import UserError


class Passes:
    """Forward and backward passes of one module.

    units_of:      its units by their owner
    backward:      the running one, or the last
    forward_order: owners of units, as the last forward began them
    leader:        of several micro-batches that run in another order than the hooks', while they do
    """

    def __init__(
        self,
        module: nn.Module,
        units: Sequence[Unit],
        units_of: Mapping[nn.Module, list[Unit]],
        axis: Axis,
        tensor: Along | None,
        at_boundary: Callable[[], bool],
    ) -> None:
        """tensor, at_boundary: see Backward"""
        self.module, self.units, self.units_of = module, units, units_of
        self._axis, self._at_boundary = axis, at_boundary
        self.forward_order: list[nn.Module] = []
        self.backward = Backward(units, collect(self._backward_order()), at_boundary, tensor)
        self.leader: MicroBatches | None = None
        self._thread: int | None = None  # the one that runs a forward or, on a CPU, a backward

    # ---- weights

    def gather(self, units: Sequence[Unit], backward: bool, trains: bool = True) -> None:
        with raised_here:
            for unit in units:
                unit.start_gather(backward, trains)
            for unit in units:
                unit.finish_gather()

    def prefetch(self, owner: nn.Module | None, backward: bool, trains: bool = True) -> None:
        """Start the gathers of the next module's units."""
        for unit in self.units_of.get(owner, []) if owner is not None else ():
            if unit.is_fetched:
                unit.start_gather(backward, trains)

    # ---- backward

    def begin_backward(self) -> None:
        """Begin one whose end the caller calls."""
        disks = [unit.held.disk for unit in self.units if unit.requires_grad and unit.held.disk is not None]
        before_backward([disk for disk in disks if disk.is_behind], is_last=self._at_boundary())
        self.backward.begin(self._backward_order())

    def _backward_order(self) -> list[Unit]:
        """All units, in an order of their reductions that is the same on all ranks; the root's come last."""
        root = self.units_of.get(self.module, [])
        return [*(unit for unit in reversed(self._in_order()) if unit not in root), *root]

    def _in_order(self) -> list[Unit]:
        """All units, in an order that is the same on all ranks.

        It is the module's own, in which those that are gathered change places: they are in the order of the
        last forward, as their gathers were. Ranks may compute with different ones of the others.
        """
        begun = (unit for owner in self.forward_order for unit in self.units_of.get(owner, []))
        gathered = dict.fromkeys(unit for unit in (*begun, *self.units) if not unit.is_whole)
        following = iter(gathered)
        return [unit if unit.is_whole else next(following) for unit in self.units]

    @torch._disable_dynamo
    def ready(self, unit: Unit) -> None:
        """All gradients of a unit are there."""
        self.backward.ready(unit)

    def end_backward(self) -> None:
        self.backward.end()
        self.leave_thread()
        if self._at_boundary() and backend() not in ("gloo", "fake"):
            self._axis.order.compare()

    def leave_broken_backward(self) -> None:
        """If the last backward ended with an exception, discard its gathered weights and partial gradients.

        This includes gradients that earlier backward passes accumulated under `no_sync`, because some units'
        gradients may already have been reduced to the optimizer's level. The gradients that the optimizer's
        parameters already have stay until `zero_grad`.
        """
        if self.backward.is_broken() and self.leader is None:
            self.backward.discard()

    # ---- who runs them

    def enter_thread(self) -> None:
        """Raises UserError if another thread is in a forward or backward: collectives need one order."""
        mine = threading.get_ident()
        alive = {thread.ident for thread in threading.enumerate()}
        if self._thread not in (None, mine) and self._thread in alive:
            raise UserError(
                "another thread runs a forward or backward of this module",
                where=type(self.module).__name__,
                allowed="one thread at a time",
            )
        self._thread = mine

    def leave_thread(self) -> None:
        self._thread = None

    @contextmanager
    def led_by(self, leader: MicroBatches) -> Iterator[None]:
        """Passes in this context go in the leader's order."""
        self.enter_thread()
        self.leave_broken_backward()
        self.leader = leader
        try:
            yield
        except BaseException:
            self.backward.discard()
            raise
        finally:
            self.leader = None
            self.leave_thread()
