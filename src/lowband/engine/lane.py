"""The lane: collectives in one fixed order, behind the computation.

[Note: one lane] All collectives of an engine go through one lane, in the order of submission. The order is
the same on every rank because every rank runs the same model, so groups that overlap cannot dead-lock. On
CPU the lane is a thread (gloo blocks in C++ without the GIL); on a GPU it is a stream.
"""

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Protocol

import torch
import torch.distributed as dist


class Handle(Protocol):
    """Work that has been submitted to a lane."""

    def wait(self) -> None:
        """Return when the caller may use the work's results. Raises what the work raised."""


class Lane:
    """A thread that runs work in order. `exposed_s` is the time that callers waited for it."""

    def __init__(self, overlap: bool = True) -> None:
        self._overlap = overlap
        threads = torch.get_num_threads()  # a new thread would start with the library's default
        self._pool = ThreadPoolExecutor(
            1, thread_name_prefix="lowband-lane", initializer=torch.set_num_threads, initargs=(threads,)
        )
        self.exposed_s = 0.0
        self.busy_s = 0.0

    def submit(self, work: Callable[[], None], uses: Sequence[torch.Tensor | None] = ()) -> Handle:
        """Start work; without overlap the caller waits for it here.

        uses: tensors of the work that the caller is about to let go; kept until the work is waited for
        """
        handle = self._start(work, uses)
        if not self._overlap:
            handle.wait()
        return handle

    def _start(self, work: Callable[[], None], _uses: Sequence[torch.Tensor | None]) -> Handle:
        return _Waiting(self, self._pool.submit(self._run, work))  # which refers to what it uses

    def _run(self, work: Callable[[], None]) -> None:
        start = time.perf_counter()
        with torch.no_grad():
            work()
        self.busy_s += time.perf_counter() - start

    def take_times(self) -> tuple[float, float]:
        """Seconds exposed and seconds busy since the last call."""
        times = self.exposed_s, self.busy_s
        self.exposed_s = self.busy_s = 0.0
        return times


class _Waiting:
    def __init__(self, lane: Lane, future: Future[None]) -> None:
        self._lane, self._future = lane, future

    def wait(self) -> None:
        start = time.perf_counter()
        self._future.result()
        self._lane.exposed_s += time.perf_counter() - start


class InlineLane(Lane):
    """Runs work where it is submitted: torch's fake tensors, stand-ins for a large job, know one thread."""

    def _start(self, work: Callable[[], None], _uses: Sequence[torch.Tensor | None]) -> Handle:
        done: Future[None] = Future()
        done.set_result(self._run(work))
        return _Waiting(self, done)


class StreamLane(Lane):
    """The same on a CUDA or HIP device: a side stream.

    [Note: lane and allocator] Work starts after everything the caller had issued before. So memory that the
    caller frees is taken again by later work only after the caller's kernels that used it. The other way
    round the handle refers to what the work uses until the caller has waited; not by `record_stream`: the
    host may be a whole backward ahead, and memory so recorded is not free before the side stream has really
    passed. `exposed_s` is read from events when times are taken.
    """

    def __init__(self, device: torch.device, overlap: bool = True) -> None:
        super().__init__(overlap)
        self._device, self._stream = device, torch.cuda.Stream(device)
        self._spans: list[tuple[torch.cuda.Event, torch.cuda.Event, bool]] = []
        self._is_timed = False  # from the first `take_times` on: events are kept only if somebody takes them

    def _start(self, work: Callable[[], None], uses: Sequence[torch.Tensor | None]) -> Handle:
        held = list(uses)  # before the work, which may empty the caller's list
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        start = torch.cuda.Event(enable_timing=True)
        done = torch.cuda.Event(enable_timing=True)
        with torch.cuda.stream(self._stream), torch.no_grad():
            start.record()
            work()
            done.record()
        self._keep(start, done, is_busy=True)
        return _OnStream(self, done, held)

    def _keep(self, start: torch.cuda.Event, done: torch.cuda.Event, is_busy: bool) -> None:
        if self._is_timed:
            self._spans.append((start, done, is_busy))

    def take_times(self) -> tuple[float, float]:
        self._is_timed = True
        torch.cuda.synchronize(self._device)
        for start, done, busy in self._spans:
            seconds = max(0.0, start.elapsed_time(done)) / 1e3
            if busy:
                self.busy_s += seconds
            else:
                self.exposed_s += seconds
        self._spans.clear()
        return super().take_times()


class _OnStream:
    def __init__(self, lane: StreamLane, done: torch.cuda.Event, held: list[torch.Tensor | None]) -> None:
        self._lane, self._done, self._held = lane, done, held

    def wait(self) -> None:
        here = torch.cuda.current_stream(self._lane._device)
        reached = torch.cuda.Event(enable_timing=True)
        reached.record(here)
        here.wait_event(self._done)
        self._held.clear()  # taken again only by what the caller's stream does from here on
        # The caller's stream stood still from `reached` to `done`; a negative span means it did not.
        self._lane._keep(reached, self._done, is_busy=False)


def new_lane(device: torch.device, overlap: bool) -> Lane:
    """The lane that suits the device and the back end of torch.distributed."""
    if dist.get_backend() == "fake":
        return InlineLane()
    return StreamLane(device, overlap) if device.type == "cuda" else Lane(overlap)
