"""Lanes run collectives behind the computation; there is one lane for the links of each level, and one for
each other memory that a rank's own shards are copied to and from (spec.tiers).

[Note: order] A collective is a generator. Its first part runs in the lane of its first level; at each
`yield level, tensors` it moves on to that level's lane. A lane runs parts in the order in which their
collectives were submitted, which is the same on every rank because every rank runs the same program. So hops
of different collectives over different levels' links overlap. A flat collective, whose ring uses the links of
several levels, runs in the lane of its outermost one. Ranks cannot deadlock: of all unfinished
parts, the first part of the collective that was submitted first waits for nothing but its partners, and for
an update of states on a disk (units.behind), whose reads and writes have a lane that waits for no other.

On a CPU a lane is a thread (gloo blocks in C++ without the GIL); on a GPU it is a stream.
"""

import threading
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import NamedTuple, Protocol

import torch

from lowband.engine.backend import backend
from lowband.engine.transport.gloo import PeerLost

STATES = "states on disk"  # the lane of an optimizer's states

# Yields the level whose lane comes next, and the tensors that were made in this lane and are used in the
# next one.
Work = Generator[tuple[str, Sequence[torch.Tensor]], None, object]


class LaneTimes(NamedTuple):
    """Seconds.

    exposed_s:  in which callers have waited
    busy_s:     in which any lane was busy
    exchange_s: the part of exposed_s that was for exchanges between replicas
    """

    exposed_s: float
    busy_s: float
    exchange_s: float


class Handle(Protocol):
    """A collective that has been submitted."""

    def wait(self, is_exposed: bool = True) -> None:
        """Return when the caller may use the results. Raises the collective's error.

        is_exposed: whether the time counts as one in which a caller has waited
        """


class Lanes:
    """The lanes of one topology, a thread each. Every engine on the topology submits to them."""

    def __init__(self, levels: Sequence[str]) -> None:
        """levels: the topology's levels, including `self`, where collectives without a hop run; and tiers"""
        threads = torch.get_num_threads()  # a new thread would start with the library's default
        self._threads = {
            level: ThreadPoolExecutor(
                1,
                thread_name_prefix=f"lowband-{level}",
                initializer=torch.set_num_threads,
                initargs=(threads,),
            )
            for level in levels
        }
        self._lock = threading.Lock()
        self._running, self._busy_since, self._busy_s = 0, 0.0, 0.0
        self._exposed_s, self._exchange_s = 0.0, 0.0
        self._is_exchanging = False
        self._lost: PeerLost | None = None

    def submit(self, levels: Sequence[str], work: Work, uses: Sequence[torch.Tensor | None] = ()) -> Handle:
        """Start a collective.

        levels: the levels that `work` yields, in order
        uses:   tensors of the work that the caller is about to free; kept until the handle's `wait`
        """
        future: Future[None] | None = None
        for level in levels:
            future = self._threads[level].submit(self._run_part, work, level, future)
        assert future is not None
        return _Waiting(self, future)  # the work itself refers to the tensors

    def on_each_thread(self, call: Callable[[], None]) -> None:
        """Run `call` once in every thread that runs collectives, except the caller's own."""
        for future in [thread.submit(call) for thread in self._threads.values()]:
            future.result()

    @contextmanager
    def exchanging(self) -> Iterator[None]:
        """What the caller waits for in this context is an exchange between replicas."""
        self._is_exchanging = True
        try:
            yield
        finally:
            self._is_exchanging = False

    def take_times(self) -> LaneTimes:
        """The times since the last call."""
        with self._lock:
            if self._running:  # an exchange that takes several steps
                self._busy_s += (now := time.perf_counter()) - self._busy_since
                self._busy_since = now
            times = LaneTimes(self._exposed_s, self._busy_s, self._exchange_s)
            self._exposed_s = self._busy_s = self._exchange_s = 0.0
        return times

    def _run_part(self, work: Work, level: str, before: Future[None] | None) -> None:
        if before is not None:
            before.result()
        if self._lost is not None:  # this part would wait its whole timeout for a lost partner
            raise self._lost
        self._begin()
        try:
            with torch.no_grad():
                _advance(work, level, is_first=before is None)
        except PeerLost as error:
            self._lost = error
            raise
        finally:
            self._end()

    def _begin(self) -> None:
        with self._lock:
            if not self._running:
                self._busy_since = time.perf_counter()
            self._running += 1

    def _end(self) -> None:
        with self._lock:
            self._running -= 1
            if not self._running:
                self._busy_s += time.perf_counter() - self._busy_since

    def _count_exposed(self, seconds: float) -> None:
        with self._lock:
            self._exposed_s += seconds
            self._exchange_s += seconds if self._is_exchanging else 0.0


def _advance(work: Work, level: str, is_first: bool) -> Sequence[torch.Tensor]:
    """Run the part of `work` in the lane of `level`; returns the tensors that the next part uses."""
    try:
        if is_first:
            named, _ = next(work)
            assert named == level, (named, level)
        _, used_next = next(work)
    except StopIteration:
        return ()
    return used_next


class _Waiting:
    def __init__(self, lanes: Lanes, future: Future[None]) -> None:
        self._lanes, self._future = lanes, future

    def wait(self, is_exposed: bool = True) -> None:
        start = time.perf_counter()
        self._future.result()
        if is_exposed:
            self._lanes._count_exposed(time.perf_counter() - start)


class InlineLanes(Lanes):
    """Runs collectives in the submitting thread, because torch's fake tensors, which stand in for a large
    job, work in one thread only.
    """

    def submit(self, levels: Sequence[str], work: Work, _uses: Sequence[torch.Tensor | None] = ()) -> Handle:
        done: Future[None] = Future()
        self._begin()
        with torch.no_grad():
            for i, level in enumerate(levels):
                _advance(work, level, is_first=i == 0)
        self._end()
        done.set_result(None)
        return _Waiting(self, done)

    def on_each_thread(self, call: Callable[[], None]) -> None:
        """Does nothing, because collectives run in the caller's own thread."""


class StreamLanes(Lanes):
    """The lanes of one topology on a CUDA or HIP device: a side stream for each level.

    [Note: lanes and allocator] Every part starts after all work that the caller issued before submitting it.
    So later work reuses memory that the caller frees only after the caller's kernels that used it. In turn,
    the handle keeps tensors that the caller is about to free, and tensors that one lane makes and another
    reads, until the caller has waited. `record_stream` would not do: the host may be a whole backward pass
    ahead, and memory recorded that way is not free until the side stream has actually passed that point.

    The streams have high priority: a collective's few blocks need not queue behind a matrix product's many.
    """

    def __init__(self, levels: Sequence[str], device: torch.device) -> None:
        super().__init__((STATES,))  # whose work is the CPU's
        self._device = device
        self._streams = {level: torch.cuda.Stream(device, priority=-1) for level in levels}
        self._waits: list[tuple[torch.cuda.Event, torch.cuda.Event, bool]] = []
        self._parts: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        self._is_timed = False  # True from the first `take_times` on: events are kept only if they are read

    def submit(self, levels: Sequence[str], work: Work, uses: Sequence[torch.Tensor | None] = ()) -> Handle:
        if levels == [STATES]:
            return super().submit(levels, work, uses)
        held = list(uses)  # copied before the work, which may empty the caller's list
        caller = torch.cuda.current_stream(self._device)
        done: torch.cuda.Event | None = None
        for level in levels:
            stream = self._streams[level]
            stream.wait_stream(caller)
            if done is not None:
                stream.wait_event(done)
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            with torch.cuda.stream(stream), torch.no_grad():
                start.record()
                held += _advance(work, level, is_first=done is None)
                end.record()
            done = end
            if self._is_timed:
                self._parts.append((start, end))
        assert done is not None
        return _OnStream(self, done, held)

    def on_each_thread(self, call: Callable[[], None]) -> None:
        """Does nothing, because collectives run in the caller's own thread."""

    def take_times(self) -> LaneTimes:
        self._is_timed = True
        # Not the device: an exchange between replicas may go on. Its parts are counted once they have ended.
        torch.cuda.current_stream(self._device).synchronize()
        # The caller's stream stalled from reaching a wait until its event; a negative span means no stall.
        stalls = [(max(0.0, reached.elapsed_time(done)), was) for reached, done, was in self._waits]
        exposed_ms, exchange_ms = sum(ms for ms, _ in stalls), sum(ms for ms, was in stalls if was)
        ended = [part for part in self._parts if part[1].query()]
        self._parts = [part for part in self._parts if part not in ended]
        busy_ms = _union_ms(ended)
        self._waits.clear()
        of_disk = super().take_times()
        exposed_s, busy_s = exposed_ms / 1e3 + of_disk.exposed_s, busy_ms / 1e3 + of_disk.busy_s
        return LaneTimes(exposed_s, busy_s, exchange_ms / 1e3)


def _union_ms(parts: Sequence[tuple[torch.cuda.Event, torch.cuda.Event]]) -> float:
    """Milliseconds in which at least one part ran."""
    if not parts:
        return 0.0
    origin = parts[0][0]
    busy, until = 0.0, float("-inf")
    for start, end in sorted((origin.elapsed_time(a), origin.elapsed_time(b)) for a, b in parts):
        busy += max(0.0, end - max(start, until))
        until = max(until, end)
    return busy


class _OnStream:
    def __init__(self, lanes: StreamLanes, done: torch.cuda.Event, held: list[torch.Tensor | None]) -> None:
        self._lanes, self._done, self._held = lanes, done, held

    def wait(self, is_exposed: bool = True) -> None:
        here = torch.cuda.current_stream(self._lanes._device)
        if self._lanes._is_timed and is_exposed:
            reached = torch.cuda.Event(enable_timing=True)
            reached.record(here)
            self._lanes._waits.append((reached, self._done, self._lanes._is_exchanging))
        here.wait_event(self._done)
        self._held.clear()  # the memory is reused only by later work on the caller's stream


def new_lanes(levels: Sequence[str], device: torch.device) -> Lanes:
    """New lanes of the kind that suits the device and the back end of torch.distributed."""
    if backend() == "fake":
        return InlineLanes(levels)
    return StreamLanes(levels, device) if device.type == "cuda" else Lanes(levels)


@contextmanager
def outside_of_modes() -> Iterator[None]:
    """Outside of the caller's inference mode, because lanes fill buffers outside of it; without a graph."""
    with torch.inference_mode(False), torch.no_grad():
        yield
