"""Races between streams, found without a GPU: accesses to memory that nothing puts in order.

Stand-ins for torch.cuda's streams and events keep vector clocks (Mattern 1989); every operator that torch
dispatches, collectives included, is an access by the stream that is current then. Kernels on CPU tensors run
at once, so values are right whatever the order: only the clocks show a race.

Memory is a storage. Once freed, it may be taken by the next allocation on the stream that it was allocated
on, as by CUDA's caching allocator: that allocation must come after every access to it.

Assumed: a collective runs on the current stream, as NCCL's do without `async_op`. Not seen: accesses that no
operator makes, such as those of Triton kernels.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

Clock = Counter[str]  # of each stream, by its name: how many of its accesses are over


class Access(NamedTuple):
    """The `tick`-th access of a stream."""

    stream: str
    tick: int
    operator: str


@dataclass
class Memory:
    """A storage, the stream that it was allocated on, and the accesses that later ones must come after."""

    storage: StorageWeakRef
    owner: str
    write: Access
    reads: dict[str, Access] = field(default_factory=dict)


class Stream:
    """Stands in for torch.cuda.Stream."""

    def __init__(self, device: "Device", name: str) -> None:
        self.device, self.name, self.clock = device, name, Clock()

    def wait_stream(self, other: "Stream") -> None:
        self._wait(other.name, other.clock)

    def wait_event(self, event: "Event") -> None:
        self._wait(event.recorded_on, event.clock)

    def record_event(self, event: "Event | None" = None) -> "Event":
        event = event or Event(self.device)
        event.record(self)
        return event

    def synchronize(self) -> None:
        self.device.host |= self.clock

    def _wait(self, other: str, clock: Clock) -> None:
        wait = f"{self.name} waits for {other}"
        self.device.waits[wait] += 1
        if not self.device.forgets(wait):
            self.clock |= clock


class Event:
    """Stands in for torch.cuda.Event. One that is not recorded is over."""

    def __init__(self, device: "Device") -> None:
        self.device, self.clock, self.recorded_on = device, Clock(), ""

    def record(self, stream: Stream | None = None) -> None:
        stream = stream or self.device.current
        self.clock, self.recorded_on = stream.clock.copy(), stream.name

    def wait(self, stream: Stream | None = None) -> None:
        (stream or self.device.current).wait_event(self)

    def synchronize(self) -> None:
        self.device.host |= self.clock

    def query(self) -> bool:
        return True

    def elapsed_time(self, _other: "Event") -> float:
        return 1.0


class Device:
    """Streams, memory, and the races seen so far, by their description."""

    def __init__(self, forgets: Callable[[str], bool] = lambda wait: False) -> None:
        """forgets: which waits are left out, by their description: faults, to show that races are found"""
        self.forgets = forgets
        self.host = Clock()  # what the host has waited for comes before all that it launches later
        self.streams = [Stream(self, "caller")]
        self.entered = [self.streams[0]]
        self.memory: dict[int, Memory] = {}
        self.freed: dict[str, list[Memory]] = {}
        self.races: Counter[str] = Counter()
        self.waits: Counter[str] = Counter()
        self.accesses: Counter[str] = Counter()

    @property
    def current(self) -> Stream:
        return self.entered[-1]

    def stand_in(self) -> None:
        """Take the place of torch.cuda's streams in this process, for good."""
        torch.cuda.Stream = self._new_stream
        torch.cuda.Event = lambda **_options: Event(self)
        torch.cuda.current_stream = lambda _device=None: self.current
        torch.cuda.default_stream = lambda _device=None: self.streams[0]
        torch.cuda.stream = self._enter
        torch.cuda.synchronize = self._synchronize
        resize = torch.UntypedStorage.resize_

        def resize_(storage: torch.UntypedStorage, size: int) -> torch.UntypedStorage:
            if storage._cdata in self.memory:
                self._free(storage._cdata)
            resize(storage, size)
            if size:
                self._memory_of(storage)
            return storage

        torch.UntypedStorage.resize_ = resize_

    def _new_stream(self, _device: object = None, priority: int = 0, **_options: object) -> Stream:
        self.streams.append(Stream(self, f"stream {len(self.streams)}"))
        return self.streams[-1]

    @contextmanager
    def _enter(self, stream: Stream | None) -> Iterator[None]:
        self.entered.append(stream or self.current)
        try:
            yield
        finally:
            self.entered.pop()

    def _synchronize(self, _device: object = None) -> None:
        for stream in self.streams:
            stream.synchronize()

    # ---- accesses

    def launch(self, operator: str, read: list[torch.Tensor], written: list[torch.Tensor]) -> None:
        """The current stream runs an operator."""
        self.collect()
        for tensor in read:
            memory = self._memory_of(tensor.untyped_storage())
            self._check(operator, "reads", [memory.write])
            memory.reads[self.current.name] = self._access(operator)
        for tensor in written:
            memory = self._memory_of(tensor.untyped_storage())
            self._check(operator, "writes", [memory.write, *memory.reads.values()])
            memory.write, memory.reads = self._access(operator), {}

    def collect(self) -> None:
        """Free what nobody refers to any more."""
        for key in [key for key, memory in self.memory.items() if memory.storage.expired()]:
            self._free(key)

    def _memory_of(self, storage: torch.UntypedStorage) -> Memory:
        """What is known of a storage. One that is new was allocated just now, on the current stream."""
        if storage._cdata not in self.memory:
            stream = self.current.name
            for old in self.freed.pop(stream, []):
                self._check("an allocation", "takes", [old.write, *old.reads.values()])
            self.memory[storage._cdata] = Memory(StorageWeakRef(storage), stream, self._access("allocation"))
        return self.memory[storage._cdata]

    def _free(self, key: int) -> None:
        memory = self.memory.pop(key)
        self.freed.setdefault(memory.owner, []).append(memory)

    def _access(self, operator: str) -> Access:
        """One more access by the current stream, after all that the host has waited for."""
        stream = self.current
        stream.clock |= self.host
        stream.clock[stream.name] += 1
        self.accesses[stream.name] += 1
        return Access(stream.name, stream.clock[stream.name], operator)

    def _check(self, operator: str, verb: str, before: list[Access]) -> None:
        """Note a race with each access that the current stream need not come after."""
        seen = self.current.clock | self.host
        for access in before:
            if seen[access.stream] < access.tick:
                self.races[
                    f"{operator} on {self.current.name} {verb} what {access.operator} on {access.stream} uses"
                ] += 1


class Watch(TorchDispatchMode):
    """Every operator launched on a device's current stream."""

    def __init__(self, device: Device) -> None:
        super().__init__()
        self._device = device

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        name = func._overloadpacket.__name__
        read, written = _collective(args) if func.namespace == "c10d" else _operands(func, args, kwargs)
        known = {tensor.untyped_storage()._cdata for tensor in (*read, *written)}
        if name.startswith("new_") or name.endswith("_like"):
            read = []  # these take a tensor's sizes only
        fresh = [t for t in _tensors(out) if t.untyped_storage()._cdata not in known]
        if written or fresh or not _tensors(out):  # else it made views: no kernel ran
            self._device.launch(name, read, written + fresh)
        return out


def _tensors(values: Any) -> list[torch.Tensor]:
    """Those that have memory."""
    tensors = [value for value in tree_leaves(values) if isinstance(value, torch.Tensor)]
    return [tensor for tensor in tensors if tensor.untyped_storage().nbytes()]


def _operands(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Tensors that an operator reads, and those that it writes: its schema marks them."""
    read: list[torch.Tensor] = []
    written: list[torch.Tensor] = []
    for i, argument in enumerate(func._schema.arguments):
        value = args[i] if i < len(args) else kwargs.get(argument.name)
        is_written = argument.alias_info is not None and argument.alias_info.is_write
        (written if is_written else read).extend(_tensors(value))
    return read, written


def _collective(args: tuple[Any, ...]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """The same of a collective, whose schema marks nothing: outputs come before inputs, if there are both."""
    given = [tensors for tensors in map(_tensors, args) if tensors]
    return given[-1], given[0]
