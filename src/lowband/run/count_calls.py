"""Bytes sent, counted from outside of the engine, where torch dispatches collectives, whoever calls them.

It works the same way for our engine and for every peer, without asking any engine. Watching slows every
operator down, so only one step of the warm-up is watched.

[Note: what is counted] The bytes that a rank must send, as a mean over its group of n ranks, independent of
the back end's algorithm: (n-1) x input of an all-gather, (n-1)/n x input of a reduce-scatter or all-to-all,
twice that for an all-reduce, (n-1)/n of a broadcast's or reduce's tensor. gloo's reduce-scatter sends twice
its share.
[Note: other threads] A DDP hook may start its next all-reduce when the one before has ended, on a thread of
the back end. So while a step is watched, `dist.all_reduce` watches the thread that calls it.
[Note: level of a group] The innermost level that contains the whole group. A collective over all ranks
counts entirely as `world`, although part of it stays inside nodes.
"""

import threading
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lowband.engine.transport.lane import Lanes
from lowband.spec.mesh import Levels
from lowband.spec.records import CONTROL, Sent, SentRow, of_rows

CONTROL_BYTES = 4096  # all-reduces and broadcasts up to this size are of norms or flags, not of states

# c10d and functional operators -> collective, and index of the sent argument (0 for in-place operators)
_OPERATORS = {
    "_allgather_base_": ("all_gather", 1),
    "allgather_": ("all_gather", 1),
    "allgather_into_tensor_coalesced_": ("all_gather", 1),
    "all_gather_into_tensor": ("all_gather", 0),
    "all_gather_into_tensor_out": ("all_gather", 0),
    "_reduce_scatter_base_": ("reduce_scatter", 1),
    "reduce_scatter_": ("reduce_scatter", 1),
    "reduce_scatter_tensor_coalesced_": ("reduce_scatter", 1),
    "reduce_scatter_tensor": ("reduce_scatter", 0),
    "allreduce_": ("all_reduce", 0),
    "allreduce_coalesced_": ("all_reduce", 0),
    "all_reduce": ("all_reduce", 0),
    "all_reduce_": ("all_reduce", 0),
    "alltoall_base_": ("all_to_all", 1),
    "alltoall_": ("all_to_all", 1),
    "all_to_all_single": ("all_to_all", 0),
    "broadcast_": ("broadcast", 0),
    "broadcast": ("broadcast", 0),
    "reduce_": ("reduce", 0),
    "send": ("send", 0),
}
_SILENT = {
    "_wrap_tensor_autograd",
    "barrier",
    "monitored_barrier_",
    "wait_tensor",
    "recv_",
    "recv_any_source_",
}

_SHARE: dict[str, Callable[[int, int], int]] = {
    "all_gather": lambda size, n: (n - 1) * size,
    "reduce_scatter": lambda size, n: (n - 1) * size // n,
    "all_to_all": lambda size, n: (n - 1) * size // n,
    "all_reduce": lambda size, n: 2 * (n - 1) * size // n,
    "broadcast": lambda size, n: (n - 1) * size // n,
    "reduce": lambda size, n: (n - 1) * size // n,
    "send": lambda size, n: size,
}


class Outside:
    """A context that counts this rank's collectives, including those on the lanes' threads."""

    def __init__(self, levels: Levels, lanes: Lanes | None) -> None:
        self._levels, self._lanes = levels, lanes
        self._watches: dict[int, _Watch] = {}  # by thread: a dispatch mode watches one
        self._started: frozenset[int] = frozenset()  # the threads that are watched all the time

    def __enter__(self) -> "Outside":
        self._on_each_thread(lambda watch: watch.start())
        self._started = frozenset(self._watches)
        self._all_reduce = dist.all_reduce
        dist.all_reduce = self._watched_all_reduce
        return self

    def __exit__(self, *_: object) -> None:
        dist.all_reduce = self._all_reduce
        self._on_each_thread(lambda watch: watch.stop())

    def _watched_all_reduce(self, *args: Any, **kwargs: Any) -> Any:
        """See [Note: other threads]."""
        if threading.get_ident() in self._started:
            return self._all_reduce(*args, **kwargs)
        watch = self._watches.setdefault(threading.get_ident(), _Watch(self._levels))
        watch.start()
        try:
            return self._all_reduce(*args, **kwargs)
        finally:
            watch.stop()

    def _on_each_thread(self, call: Callable[["_Watch"], None]) -> None:
        def of_this_thread() -> None:
            call(self._watches.setdefault(threading.get_ident(), _Watch(self._levels)))

        of_this_thread()
        if self._lanes is not None:
            self._lanes.on_each_thread(of_this_thread)

    @property
    def sent(self) -> tuple[Sent, ...]:
        """The bytes counted so far, by level, collective and dtype on the wire."""
        counts = Counter[SentRow]()
        for watch in self._watches.values():
            counts += watch.counts
        return of_rows(dict(sorted(counts.items())))


class _Watch(TorchDispatchMode):
    """Counts one thread's collectives. Raises RuntimeError for an unknown one."""

    def __init__(self, levels: Levels) -> None:
        super().__init__()
        self._levels = levels
        self.counts = Counter[SentRow]()

    def start(self) -> None:
        self.__enter__()

    def stop(self) -> None:
        self.__exit__(None, None, None)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if DTensor in types:  # decomposed first into plain tensors and collectives, which come here too
            return NotImplemented
        if func.namespace in ("c10d", "_c10d_functional"):
            self._count(func._overloadpacket.__name__, args)
        return func(*args, **(kwargs or {}))

    def _count(self, operator: str, args: tuple[Any, ...]) -> None:
        if operator in _SILENT:
            return
        if operator not in _OPERATORS:
            raise RuntimeError(f"a collective that is not counted: {operator}")
        collective, place = _OPERATORS[operator]
        tensors = [t for t in tree_leaves(args[place]) if isinstance(t, torch.Tensor)]
        ranks = dist.get_process_group_ranks(_group(args))
        size = sum(t.numel() * t.element_size() for t in tensors)
        if len(ranks) == 1 or size == 0:
            return
        is_small = collective in ("all_reduce", "broadcast") and size <= CONTROL_BYTES
        is_control = is_small or tensors[0].dtype == torch.float64  # norms are summed in fp64, states never
        name = CONTROL if is_control else collective
        wire = str(tensors[0].dtype).removeprefix("torch.")
        self.counts[level_of(ranks, self._levels), name, wire] += _SHARE[collective](size, len(ranks))


def _group(args: tuple[Any, ...]) -> dist.ProcessGroup:
    """The process group of an operator's arguments: c10d takes the group itself, functional ops its name."""
    for value in args:
        if isinstance(value, torch.ScriptObject):
            try:
                return dist.ProcessGroup.unbox(value)
            except (RuntimeError, TypeError):
                continue  # a reduce op
        if isinstance(value, dist.ProcessGroup):
            return value
    name = next(value for value in reversed(args) if isinstance(value, str))
    return dist.distributed_c10d._resolve_process_group(name)


def level_of(ranks: Iterable[int], levels: Levels) -> str:
    """The level that a group of ranks counts as. See [Note: level of a group]."""
    ranks = list(ranks)
    places = zip(levels.names, levels.sizes, strict=True)
    return next(name for name, size in places if len({rank // size for rank in ranks}) == 1)
