"""A unit's optimizer states on a disk: master weights, and what the optimizer keeps of each shard.

Their tensors exist all the time and have memory only between a read and a write. These run in the disk's
lane, in the order in which they were submitted, so that no more than two units are in memory.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from itertools import chain
from typing import ClassVar, Protocol

import torch
from torch import nn
from torch.optim.optimizer import Optimizer

from lowband.engine.collectives.collectives import Collectives
from lowband.engine.transport.call import Call
from lowband.engine.transport.lane import Handle, Work
from lowband.engine.units.absent import Lies, StateOnDisk
from lowband.spec.step import FETCH, STASH, Collective
from lowband.spec.tiers import DISK, HOST, Tier, at


class States(Protocol):
    """What keeps tensors while they have no memory: a file (engine.disk), or other memory.

    is_direct: whether it is a file that goes around the page cache
    """

    is_direct: bool

    def write(self, tensors: Sequence[torch.Tensor]) -> None:
        """Keep these values."""

    def read(self, tensors: Sequence[torch.Tensor]) -> None:
        """Fill them with what was written from as many."""


class OnDisk:
    """One unit's states on one rank.

    tier, used_in: where they lie, and where they have memory while they are used
    rounded:       1D, where they are used, in the compute dtype: the newest master weights
    """

    tier: ClassVar[Tier] = DISK
    used_in: ClassVar[Tier] = HOST
    place: ClassVar[str] = "on a disk"
    called: ClassVar[str] = "states on disk"

    def __init__(
        self,
        unit: str,
        master: torch.Tensor,
        rounded: torch.Tensor,
        file: States,
        collectives: Collectives,
    ) -> None:
        """master: 1D, fp32, which is there until the first `write`"""
        self.rounded, self._unit, self._master, self._file = rounded, unit, master, file
        self._collectives, self._meter = collectives, collectives.meter
        self._tensors = [master]
        self._states: dict[nn.Parameter, list[torch.Tensor]] = {}  # by shard
        self._sizes = [master.nbytes]
        self._held = 0  # bytes of them in memory
        self._is_counted = True
        self._moving: Handle | None = None
        self._is_in_memory, self._is_written = True, False
        self._count()

    # ---- one after the other

    def start_read(self, is_counted: bool = True) -> None:
        """Begin to fill the tensors.

        is_counted: as a part of a step, which a failed write ends; its tensors are still in memory
        """
        with nullcontext() if is_counted else suppress(OSError):
            self.wait()
        self._is_counted = is_counted
        if not self._is_in_memory:
            self._submit(self._read, FETCH, is_counted)

    def start_write(
        self, optimizer: Optimizer | None, shards: Sequence[nn.Parameter], is_counted: bool = True
    ) -> None:
        """Begin to write the tensors, those that the optimizer has of the shards too, and free them."""
        self.wait()
        if optimizer is not None:
            self._states |= self._states_of(optimizer, shards)  # others may be of another optimizer
            self._tensors = [self._master, *chain.from_iterable(self._states.values())]
            self._sizes = [tensor.nbytes for tensor in self._tensors]
        self._is_written = False
        self._count()
        # A unit may compute with them; what it computed with before is gone with the step (units.unit).
        with torch.autograd._unsafe_preserve_version_counter(self.rounded):
            self.rounded.copy_(self._master.detach())
        self._submit(self._write, STASH, is_counted)

    @property
    def is_readable(self) -> bool:
        """Whether the tensors are in memory, and stay there: a write that runs would free them."""
        return self._is_in_memory and self._moving is None

    def frees_gradients(self) -> None:
        """Return when those of the last step may change."""

    @property
    def is_direct(self) -> bool:
        """Whether its file goes around the page cache."""
        return self._file.is_direct

    def wait(self) -> None:
        """Wait for what has begun. Raises its error; then everything is in memory, or on the disk, still."""
        if self._moving is not None:
            moving, self._moving = self._moving, None
            moving.wait()

    @contextmanager
    def in_memory(self) -> Iterator[None]:
        """Read the tensors for a while, in which they do not change; not counted."""
        self.start_read(is_counted=False)
        self.wait()
        try:
            yield
        finally:
            self.forget()

    def forget(self) -> None:
        """Free the tensors, which have not changed since they were read, if the disk has them."""
        self.wait()
        if self._is_written:
            self._free()

    def _submit(self, part: Callable[[Call], Work], row: Collective, is_counted: bool) -> None:
        if is_counted:  # now: the last write of a step may end in the next one
            self._collectives.ledger.add(self.tier, row.name, "native", sum(self._sizes))
        self._moving = self._collectives.submit(self._unit, [self.tier], part)

    def _read(self, _: Call) -> Work:
        yield self.tier, []
        for tensor, size in zip(self._tensors, self._sizes, strict=True):
            tensor.untyped_storage().resize_(size)
        self._count()
        self._is_in_memory = True
        try:
            self._file.read(self._tensors)
        except BaseException:
            self._free()
            raise

    def _write(self, _: Call) -> Work:
        yield self.tier, []
        self._file.write(self._tensors)
        self._is_written = True
        self._free()

    def _states_of(
        self, optimizer: Optimizer, shards: Sequence[nn.Parameter]
    ) -> dict[nn.Parameter, list[torch.Tensor]]:
        """What the optimizer keeps of each element of its shards; from now on it says when it is absent."""
        found: dict[nn.Parameter, list[torch.Tensor]] = {}
        with torch._C.DisableTorchFunctionSubclass():
            for shard in shards:
                if not (state := optimizer.state.get(shard, {})):
                    continue
                found[shard] = []
                for key, value in state.items():
                    if isinstance(value, torch.Tensor) and value.shape == shard.shape and value.numel():
                        lies = Lies(self, f"{key} of {shard.shard_of.name}")  # type: ignore[attr-defined]
                        found[shard].append(plain := value.as_subclass(torch.Tensor))
                        state[key] = StateOnDisk.of(plain, lies)
        return found

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


@contextmanager
def all_in_memory(
    disks: Sequence[tuple[OnDisk, Sequence[nn.Parameter]]], optimizer: Optimizer, writes: bool
) -> Iterator[None]:
    """Read the states of all these units at once, with their shards; not counted. writes: they may change"""
    for disk, _ in disks:
        disk.start_read(is_counted=False)
    is_changed = False
    try:
        for disk, _ in disks:
            disk.wait()
        yield
        is_changed = writes
    finally:
        for disk, shards in disks:
            if is_changed:
                disk.start_write(optimizer, shards, is_counted=False)
            else:
                disk.forget()
