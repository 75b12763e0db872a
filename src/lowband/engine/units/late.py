"""Updates one step late: the host's update of a step runs behind the next step's forward and backward.

So step t + 1 computes with weights that lack step t's update, as the delayed parameter update of ZeRO-Offload
does (arXiv 2101.06840, section 5.2; there the first steps are not late):

    step t    wait for the update of step t - 1; its weights are those of the next forward
              begin the update of step t, in a thread, from this step's gradients and options
              return

A step that is left out, as one with a NaN, begins none and waits for none. Whoever saves the state waits, and
then the next forward has all updates: so training goes on from a checkpoint as it would have without an end.

[Note: own counter] The thread's tensors are views with version counters of their own, or a forward and its
backward would see the weights change (units.changes). The update has the options of its step
(units.copied), and its gradients wait for it (units.shard_grad).
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import Any, ClassVar

import torch
from torch import nn
from torch.optim.optimizer import Optimizer

from lowband.engine.transport.meter import MemoryMeter
from lowband.engine.units.copied import CopiedOptimizer, be_updated, begin, end_update, is_new, is_updated
from lowband.engine.units.on_disk import OnDisk
from lowband.engine.units.shard_grad import give_back_gradients, take_gradient
from lowband.errors import UserError
from lowband.spec.tiers import HOST, Tier, at


class Late(OnDisk):
    """One unit's states on one rank, in host memory: readable while they are saved or loaded. At other times
    an update may be on its way, and no forward before the next step would see what is written.

    rounded: 1D, host memory, in the compute dtype: the weights that the next forward computes with
    """

    tier: ClassVar[Tier] = HOST
    place: ClassVar[str] = "being updated"
    is_behind: ClassVar[bool] = False
    called: ClassVar[str] = "late updates"

    def __init__(self, master: torch.Tensor, rounded: torch.Tensor, meter: MemoryMeter) -> None:
        """master: 1D, fp32, host memory"""
        self.rounded, self._master, self.meter = rounded, master, meter
        self.update: _Update | None = None
        self._is_open = False

    def wait(self) -> None:
        self.finish_update()

    def await_weights(self) -> None:
        """The next forward's are there."""

    @property
    def is_readable(self) -> bool:
        return self._is_open

    def start_read(self, is_counted: bool = True) -> None:
        """The state is about to be saved, or loaded."""
        self.wait()
        self._is_open = True

    def start_write(
        self,
        optimizer: Optimizer | None,
        shards: Sequence[nn.Parameter],
        is_counted: bool = True,
    ) -> None:
        """The state has been loaded."""
        if optimizer is not None:
            for shard in shards:
                self.keep(optimizer, shard, optimizer.state.get(shard, {}))
        self.show()
        self._is_open = False

    def show(self) -> None:
        """Have the next forward compute with the newest weights."""
        self.rounded.copy_(self._master.detach())

    def frees_gradients(self) -> None:
        self.wait()

    @contextmanager
    def in_memory(self) -> Iterator[None]:
        """The newest weights; those of the next forward stay what they are."""
        self.wait()
        yield

    def forget(self, is_saved: bool = False) -> None:
        """The state has been saved: the next forward has all updates. Else it has what it would have had."""
        self._is_open = False
        if is_saved:
            self.show()
            torch.autograd.graph.increment_version(self._master)

    def check_alone(self, optimizer: Optimizer, shards: Sequence[nn.Parameter]) -> None:
        """Raises UserError if another optimizer updates other shards: its update would not be late."""
        if self.update is not None and self.update.has_others(self, optimizer, shards):
            raise UserError(
                f"another optimizer has some parameters of the unit of '{shards[0].shard_of.name}'",  # type: ignore[attr-defined]
                where=f"{type(optimizer).__name__} of {self.called}",
                allowed="all of a unit in one optimizer",
            )


class _Update:
    """A step's update of some units."""

    def __init__(self, optimizer: Optimizer, step: Callable[[Optimizer], Any]) -> None:
        self._optimizer, self._step = optimizer, step
        self._shards: list[tuple[Late, nn.Parameter, torch.Tensor]] = []
        self._held = 0  # bytes of gradients
        self._running: Future[Any] | None = None

    def add(self, late: Late, shard: nn.Parameter) -> None:
        """A shard that has a gradient."""
        values = torch.empty(0, dtype=shard.dtype)  # see [Note: own counter]
        values.set_(shard.untyped_storage(), shard.storage_offset(), shard.shape)  # type: ignore[call-overload]
        assert shard.grad is not None
        values.grad = take_gradient(shard.grad, late)
        self._shards.append((late, shard, values))
        self._held += shard.grad.nbytes

    def has_others(self, late: Late, optimizer: Optimizer, shards: Sequence[nn.Parameter]) -> bool:
        """Whether it is another optimizer's, and of some of the unit's shards that are not among these."""
        mine = {id(shard) for shard in shards}
        others = any(of is late and id(shard) not in mine for of, shard, _ in self._shards)
        return self._optimizer is not optimizer and others

    def begin(self) -> None:
        """Update them in a thread."""
        if not self._shards:
            return
        of = {shard: values for _, shard, values in self._shards}
        self._copy = CopiedOptimizer(self._optimizer, self._step, of, Late.called)
        for late in {late for late, _, _ in self._shards}:
            late.update = self
        be_updated(self._optimizer, self.finish)
        self._shards[0][0].meter.add(at("grads", HOST), self._held)
        self._running = begin(_thread, partial(self._copy.step, list(of.values())))

    def finish(self) -> None:
        """Wait for it, and let the optimizer have what became of its states. Raises its error."""
        assert self._running is not None
        for late in {late for late, _, _ in self._shards}:
            late.update = None
        is_updated(self._optimizer)
        try:
            self._running.result()
        except BaseException as error:
            is_new(error)
            raise
        finally:
            self._shards[0][0].meter.release(at("grads", HOST), self._held)
            give_back_gradients({late for late, _, _ in self._shards})
        for late, shard, values in self._shards:
            late.keep(self._optimizer, shard, self._copy.state[values])
        self._copy.give_back_options()


def step_late(
    optimizer: Optimizer, step: Callable[[Optimizer], Any], shards_of: Mapping[Late, Sequence[nn.Parameter]]
) -> None:
    """Finish the last step's update, and begin this one's, by the class's step."""
    for late, shards in shards_of.items():
        late.check_alone(optimizer, shards)
    end_update(optimizer)
    for late in shards_of:
        late.wait()
    update = _Update(optimizer, step)
    for late, shards in shards_of.items():
        late.show()
        for shard in shards:
            if shard.grad is not None:
                update.add(late, shard)
    update.begin()


_thread = ThreadPoolExecutor(1, thread_name_prefix="lowband-late")
