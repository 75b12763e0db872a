"""Updates of states on a disk, which end in the next forward: the disk's traffic hides behind it.

    backward    the states of the first two units of the last forward are read: no more are in memory at once
    step        keeps gradients and options as they are, and returns
    a thread    reads, updates and writes the units in the order of the last forward
    forward     the first gather of a unit waits for that unit's new weights
    backward    waits for units that this forward has not used: no gradients of the last step are left

So bits, bytes and the most memory are those of a step that waits. Whoever reads or changes weights, states or
gradients before that forward waits for all of the update; so do another step of the same units and the end
of the process. Plain views of a gradient from before the step (`as_subclass`, `numpy`) are not seen:
who writes to one may change the update. An update that fails is an error of the next of these; a write that
fails is one of the next step, which has not begun then. What others may look at is waited for: the first step
of a shard, which makes states, and steps that change their optimizer's options.

See also units.late, [Note: own counter].
"""

import os
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any
from weakref import WeakSet

import torch
from torch import nn
from torch.optim.optimizer import Optimizer

from lowband.engine.units.copied import (
    CopiedOptimizer,
    be_updated,
    begin,
    end_update,
    is_new,
    is_updated,
    note,
)
from lowband.engine.units.on_disk import OnDisk, states_of
from lowband.engine.units.shard_grad import give_back_gradients, take_gradient

AHEAD = 2  # units whose states are read before their step: as many as there may be in memory


class Behind:
    """A step's update of some units.

    disks: those of units that have a gradient, in the order of their updates
    """

    def __init__(
        self,
        optimizer: Optimizer,
        step: Callable[[Optimizer], Any],
        shards_of: Mapping[OnDisk, Sequence[nn.Parameter]],
    ) -> None:
        """Keep the gradients and options of a step. step: the class's"""
        end_update(optimizer)
        for disk in shards_of:  # the last step's writes may have failed: nothing of this one is done yet
            disk.wait()
        moving = [disk for disk, mine in shards_of.items() if any(p.grad is not None for p in mine)]
        self.disks = sorted(moving, key=lambda disk: disk.needed)
        self._optimizer = optimizer
        self._values = {
            disk: {shard: _values(disk, shard) for shard in shards_of[disk] if shard.grad is not None}
            for disk in self.disks
        }
        of = {shard: each for values in self._values.values() for shard, each in values.items()}
        self._copy = CopiedOptimizer(optimizer, step, of, OnDisk.called)
        self._are_updated: dict[OnDisk, Future[None]] = {disk: Future() for disk in self.disks}
        self._noted: dict[OnDisk, int] = {}  # bytes
        self._error: BaseException | None = None
        self._running: Future[None] | None = None

    def begin(self) -> None:
        """Update them in a thread."""
        global _begun_in  # noqa: PLW0603
        for disk in set(_ahead) - {*self.disks[:AHEAD]}:  # there would be more than two in memory
            disk.forget()
        _ahead.clear()
        if not self.disks:
            return
        makes_states = not all(disk.knows(shard) for disk in self.disks for shard in self._values[disk])
        self._noted = {disk: disk.note_step() for disk in self.disks}
        for disk in self.disks:
            disk.update = self
        be_updated(self._optimizer, self.finish)
        _begun_in = os.getpid()
        self._running = begin(_thread, self._run)
        is_counting = self._optimizer in _counting
        if makes_states or is_counting or not all(disk.overlaps for disk in self.disks):
            self.finish()

    def await_weights(self, of: OnDisk) -> None:
        if (updated := self._are_updated.get(of)) is not None:
            updated.result()

    def finish(self) -> None:
        """Wait for it, and let the optimizer have what became of its states. Raises its error, unless
        somebody has been told of it.
        """
        assert self._running is not None
        self._running.result()
        is_updated(self._optimizer)
        give_back_gradients(self._values.keys())
        for disk in self.disks:
            disk.update = None
            disk.note_growth(self._noted[disk])
            for shard, each in self._values[disk].items():
                if state := self._copy.state.get(each):
                    disk.keep(self._optimizer, shard, state)
        if self._copy.give_back_options():
            _counting.add(self._optimizer)
        if self._error is not None and is_new(self._error):
            raise self._error

    def _run(self) -> None:
        try:
            self.disks[0].read()
            for disk, following in zip(self.disks, [*self.disks[1:], None], strict=True):
                disk.arrive()
                if following is not None:
                    following.read()
                values = self._values[disk]
                self._copy.step([*values.values()])
                disk.take({shard: states_of(shard, self._copy.state[each]) for shard, each in values.items()})
                for each in values.values():
                    each.grad = None  # is freed
                self._are_updated[disk].set_result(None)
                disk.write()
        except BaseException as error:
            self._error = error
            note(error)  # before somebody can be told
            for updated in self._are_updated.values():
                if not updated.done():
                    updated.set_exception(error)


def _values(disk: OnDisk, shard: nn.Parameter) -> torch.Tensor:
    """A shard with its gradient, as the thread sees it. See units.late, [Note: own counter]."""
    assert shard.grad is not None
    values: torch.Tensor = torch.Tensor.data.__get__(shard)  # type: ignore[attr-defined]
    values.grad = take_gradient(shard.grad, disk)
    return values


def before_backward(disks: Sequence[OnDisk], is_last: bool) -> None:
    """Wait for the last step's updates; read ahead before a step.

    disks: of units that train; is_last: whether the step follows this backward
    """
    for disk in disks:
        disk.finish_update()
    if is_last:
        for disk in sorted(disks, key=lambda disk: disk.needed)[:AHEAD]:
            if disk.overlaps and (disk in _ahead or len(_ahead) < AHEAD):
                disk.start_read_ahead()
                _ahead.add(disk)


_counting: WeakSet[Optimizer] = WeakSet()  # whose options change with each step: others may look at them
_ahead: WeakSet[OnDisk] = WeakSet()  # those read ahead since the last step
_thread = ThreadPoolExecutor(1, thread_name_prefix="lowband-behind")
_begun_in = 0  # the process that has begun updates: one that is forked from it has no thread


def _finish_all() -> None:
    """Let the update that runs end before the threads that it needs."""
    if _begun_in == os.getpid():
        _thread.submit(lambda: None).result()


# What atexit calls comes behind the end of threads; this before concurrent.futures ends its own.
threading._register_atexit(_finish_all)  # type: ignore[attr-defined]
