"""A unit's optimizer states on a disk: master weights, and what the optimizer keeps of each shard.

Their tensors exist all the time and have memory only between a read and a write. These run in the disk's
lane, in the order in which they were submitted, so that no more than two units are in memory.

An update may be on its way behind a step (units.behind), whose thread then has the tensors. Whoever else
would have them waits for it.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from itertools import chain, count
from typing import Any, ClassVar, Protocol

import torch
from torch import nn
from torch.optim.optimizer import Optimizer

from lowband.engine.collectives.collectives import Collectives
from lowband.engine.transport.lane import STATES, Handle, Work
from lowband.engine.units.absent import Lies, StateOnDisk
from lowband.engine.units.copied import plain
from lowband.spec.step import FETCH, STASH, Collective
from lowband.spec.tiers import DISK, HOST, Tier, at

_order = count(1)  # in which new weights are needed


class States(Protocol):
    """What keeps tensors while they have no memory: a file (engine.disk), or other memory.

    is_direct: whether it is a file that goes around the page cache
    """

    is_direct: bool

    def write(self, tensors: Sequence[torch.Tensor]) -> None:
        """Keep these values."""

    def read(self, tensors: Sequence[torch.Tensor]) -> None:
        """Fill them with what was written from as many."""


class Update(Protocol):
    """One that is on its way behind a step."""

    def finish(self) -> None:
        """Wait for it. Raises its error, unless somebody has been told of it."""

    def await_weights(self, of: "OnDisk") -> None:
        """Wait for the new weights of one unit. Raises the update's error."""


class OnDisk:
    """One unit's states on one rank.

    tier, used_in: where they lie, and where they have memory while they are used
    lane:          of their reads and writes
    is_behind:     whether updates run behind their steps
    rounded:       1D, where they are used, in the compute dtype: the newest master weights
    update:        that is on its way, or None
    needed:        grows with each first gather of new weights: the order of the last forward
    """

    tier: ClassVar[Tier] = DISK
    used_in: ClassVar[Tier] = HOST
    lane: ClassVar[str] = STATES
    place: ClassVar[str] = "on a disk"
    called: ClassVar[str] = "states on disk"
    is_behind: ClassVar[bool] = True
    update: Update | None = None
    needed: int = 0

    def __init__(
        self,
        master: torch.Tensor,
        rounded: torch.Tensor,
        file: States,
        collectives: Collectives,
    ) -> None:
        """master: 1D, fp32, which is there until the first `write`"""
        self.rounded, self._master, self._file = rounded, master, file
        self._collectives, self._meter = collectives, collectives.meter
        self._tensors = [master]
        self._states: dict[nn.Parameter, list[torch.Tensor]] = {}  # by shard
        self._sizes = [master.nbytes]
        self._held = 0  # bytes of them in memory
        self._is_counted = True
        self._moving: list[Handle] = []  # in their order
        self._is_in_memory, self._is_written = True, False
        self._is_read_ahead = False
        self._count()

    # ---- one after the other

    def start_read(self, is_counted: bool = True) -> None:
        """Begin to fill the tensors.

        is_counted: as a part of a step, which a failed write ends; its tensors are still in memory
        """
        self.finish_update()
        with nullcontext() if is_counted else suppress(OSError):
            self._end_moves()
        self._is_counted = is_counted
        if not self._is_in_memory:
            if is_counted:
                self._note_bytes(FETCH, sum(self._sizes))
            self._submit(self._read())

    def start_write(
        self, optimizer: Optimizer | None, shards: Sequence[nn.Parameter], is_counted: bool = True
    ) -> None:
        """Begin to write the tensors, those that the optimizer has of the shards too, and free them."""
        self.wait()
        found: dict[nn.Parameter, list[torch.Tensor]] = {}
        if optimizer is not None:
            for shard in shards:
                if state := optimizer.state.get(shard, {}):
                    found[shard] = states_of(shard, state)
                    self.keep(optimizer, shard, state)
        self.take(found)
        if is_counted:  # now: the last write of a step may end in the next one
            self._note_bytes(STASH, sum(self._sizes))
        self._submit(self._write())

    @property
    def is_readable(self) -> bool:
        """Whether the tensors are in memory, and stay there: a write that runs would free them."""
        return self._is_in_memory and not self._moving and self.update is None

    def frees_gradients(self) -> None:
        """Return when those of the last step may change. Raises the error of its update."""
        self.finish_update()

    @property
    def is_direct(self) -> bool:
        """Whether its file goes around the page cache."""
        return self._file.is_direct

    def wait(self) -> None:
        """Wait for what has begun. Raises its error; then everything is in memory, or on the disk, still."""
        self.finish_update()
        self._end_moves()

    def finish_update(self) -> None:
        """Wait for the update that is on its way. Raises its error."""
        if self.update is not None:
            self.update.finish()

    def be_needed(self) -> None:
        """The last step's weights are needed now."""
        self.needed = next(_order)

    def await_weights(self) -> None:
        """Wait until `rounded` has the last step's weights. Raises the error of an update that has failed."""
        if (update := self.update) is not None:
            update.await_weights(self)

    def keep(self, optimizer: Optimizer, shard: nn.Parameter, state: Mapping[str, Any]) -> None:
        """Let this be the optimizer's state of a shard; from now on its values say when they are absent."""
        of = optimizer.state[shard]
        with torch._C.DisableTorchFunctionSubclass():
            for key, value in [*state.items()]:
                lies = Lies(self, f"{key} of {shard.shard_of.name}")  # type: ignore[attr-defined]
                of[key] = StateOnDisk.of(plain(value), lies) if _is_of_elements(shard, value) else value

    @contextmanager
    def in_memory(self) -> Iterator[None]:
        """Read the tensors for a while, in which they do not change; not counted."""
        self.start_read(is_counted=False)
        self.wait()
        try:
            yield
        finally:
            self.forget()

    def forget(self, is_saved: bool = False) -> None:
        """Free the tensors, which have not changed since they were read, if the disk has them.

        is_saved: whether a checkpoint has them (units.late)
        """
        self.wait()
        if self._is_written:
            self._free()

    # ---- behind a step (units.behind): its thread calls these, but for `start_read_ahead`

    def start_read_ahead(self) -> None:
        """Begin to fill the tensors before their step; waits for nothing. An earlier write that has failed
        leaves them in memory, which the step is told.
        """
        if self._is_read_ahead or (self._is_in_memory and not self._moving):
            return
        self._is_counted = self._is_read_ahead = True
        self._note_bytes(FETCH, sum(self._sizes))
        self._submit(self._read())

    def note_step(self) -> int:
        """Count a step that has begun, after `wait`. Returns the bytes that it is to write."""
        self._is_counted = True
        if not self._is_in_memory:
            self._note_bytes(FETCH, sum(self._sizes))
        self._note_bytes(STASH, sum(self._sizes))
        return sum(self._sizes)

    def note_growth(self, noted: int) -> None:
        """Count what an optimizer has made in a step. noted: see `note_step`"""
        if grown := sum(self._sizes) - noted:
            self._note_bytes(STASH, grown)

    def read(self) -> None:
        """Begin to fill the tensors."""
        self._submit(self._read())

    def arrive(self) -> None:
        """Wait for that. Raises its error."""
        self._end_moves(is_exposed=False)

    def take(self, states: Mapping[nn.Parameter, list[torch.Tensor]]) -> None:
        """Know what an optimizer keeps, by shard, and round the new weights."""
        self._states |= states  # others may be of another optimizer
        self._tensors = [self._master, *chain.from_iterable(self._states.values())]
        self._sizes = [tensor.nbytes for tensor in self._tensors]
        self._is_written = False
        self._count()
        # A unit may compute with them; what it computed with before is gone with the step (units.unit).
        with torch.autograd._unsafe_preserve_version_counter(self.rounded):
            self.rounded.copy_(self._master.detach())

    def write(self) -> None:
        """Begin to write the tensors and free them."""
        self._submit(self._write())

    @property
    def overlaps(self) -> bool:
        """Whether anything runs behind the computation."""
        return self._collectives.options.overlap

    def knows(self, shard: nn.Parameter) -> bool:
        """Whether a step has made what an optimizer keeps of the shard."""
        return shard in self._states

    # ---- parts

    def _end_moves(self, is_exposed: bool = True) -> None:
        moving, self._moving, self._is_read_ahead = self._moving, [], False
        errors = []
        for each in moving:
            try:
                each.wait(is_exposed)
            except Exception as error:
                errors.append(error)
        for error in errors[:1]:
            raise error

    def _submit(self, part: Work) -> None:
        """No collective, of which all ranks would submit as many in one order."""
        self._moving.append(handle := self._collectives.lanes.submit([self.lane], part))
        if not self.overlaps:
            handle.wait()

    def _note_bytes(self, row: Collective, count: int) -> None:
        self._collectives.ledger.add(self.tier, row.name, "native", count)

    def _read(self) -> Work:
        yield self.lane, []
        if self._is_in_memory:  # a write has failed
            return
        for tensor, size in zip(self._tensors, self._sizes, strict=True):
            tensor.untyped_storage().resize_(size)
        self._count()
        self._is_in_memory = True
        try:
            self._file.read(self._tensors)
        except BaseException:
            self._free()
            raise

    def _write(self) -> Work:
        yield self.lane, []
        self._file.write(self._tensors)
        self._is_written = True
        self._free()

    def _free(self) -> None:
        for tensor in self._tensors:
            tensor.untyped_storage().resize_(0)
        self._is_in_memory = False
        self._meter.release(at("buffers", self.used_in), self._held)
        self._held = 0

    def _count(self) -> None:
        now = sum(self._sizes) if self._is_counted else 0
        self._meter.add(at("buffers", self.used_in), now - self._held)
        self._held = now


def states_of(shard: nn.Parameter, state: Mapping[str, Any]) -> list[torch.Tensor]:
    """What an optimizer keeps of each element of a shard."""
    with torch._C.DisableTorchFunctionSubclass():
        return [plain(value) for value in state.values() if _is_of_elements(shard, value)]


def _is_of_elements(shard: nn.Parameter, value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.shape == shard.shape and value.numel() > 0
