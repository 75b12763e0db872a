"""Work that each rank does on its own with one outcome for all: an error on one rank is raised on all.

[Note: progress] Writing or reading a large checkpoint may take far longer than ranks wait for each other in
training. So the work runs in a thread, without collectives, and meanwhile the ranks meet in a tiny all-reduce
about once a second. That all-reduce has the peer timeout: a rank that died or was stopped is noticed as fast
as in training, however long the work takes. If a rank still meets the others but its work makes no progress
for that long (a hanging disk), the work ends on all ranks.
"""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from typing import Any, TypeVar
from weakref import WeakKeyDictionary, finalize

import torch
import torch.distributed as dist

from lowband.engine.transport.axis import world_timeout
from lowband.engine.transport.everyone import to_send

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.001, 1.0

T = TypeVar("T")
Context = Callable[[], AbstractContextManager[None]]
Tick = Callable[[], None]  # work calls it after every step; a step must be far shorter than the timeout


class Meeting:
    """All ranks of the job. Every rank must make the same calls, one at a time.

    rank, ranks: this one's number; how many there are
    timeout_s:  seconds without a sign of life from a rank before the others give up
    progress_s: seconds without progress of its work; default: the same
    """

    def __init__(self, timeout_s: float, progress_s: float | None = None) -> None:
        self.timeout_s, self.rank, self.ranks = timeout_s, dist.get_rank(), dist.get_world_size()
        self._progress_s = timeout_s if progress_s is None else progress_s
        # A separate group, so that messages of a save in the background never mix with the training's.
        self.group, self._gives_back = _group_of(self)

    def agree(self, work: Callable[[], T]) -> T:
        """The result of `work`, which must be short, once it has succeeded on every rank.

        If it failed, every rank raises the error of the lowest rank that failed: a UserError unchanged, an
        OSError as a UserError that names the file, anything else as a one-line RuntimeError.
        """
        result, error = None, None
        try:
            result = work()
        except Exception as raised:  # the other ranks wait for it
            error = raised
        errors = self.everyone(None if error is None else to_send(error))
        first = next((other for other in errors if other is not None), None)
        if first is not None:
            raise first from error
        return result  # type: ignore[return-value]

    def together(
        self, what: str, work: Callable[[Tick], T], meanwhile: Callable[[], object] = lambda: None
    ) -> T:
        """The result of `work`, however long it takes, once all ranks succeeded; see [Note: progress].

        what:      names the work in the TimeoutError that every rank raises if one makes no progress
        work:      must not communicate
        meanwhile: called whenever all ranks have met, about once a second; must be short
        If it failed, raises the same errors as `agree`.
        """
        running = _Running(work)
        pause = FIRST_PAUSE_S
        while self._any_is_busy(what, running):
            meanwhile()
            time.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE_S)
        result: T = self.agree(running.result)
        return result

    def first(self, what: str, work: Callable[[Tick], T]) -> T:
        """Rank 0's result of `work`, on every rank. Raises the same errors as `together`."""
        box = [self.together(what, lambda tick: None if self.rank else work(tick))]
        with self._all():
            dist.broadcast_object_list(box, src=0, group=self.group)
        return box[0]  # type: ignore[return-value]

    def everyone(self, mine: T) -> list[T]:
        """Every rank's value, by rank."""
        values: list[Any] = [None] * self.ranks
        with self._all():
            dist.all_gather_object(values, mine, group=self.group)
        return values

    def collect(self, mine: T) -> list[T]:
        """Every rank's value, by rank, on rank 0; [] elsewhere."""
        values: list[Any] = [] if self.rank else [None] * self.ranks
        with self._all():
            dist.gather_object(mine, values or None, dst=0, group=self.group)
        return values

    @contextmanager
    def _all(self) -> Iterator[None]:
        """A collective: of one that fails the group is not used again."""
        try:
            yield
        except BaseException:
            self._gives_back.detach()
            raise

    def _any_is_busy(self, what: str, running: "_Running") -> bool:
        is_busy = running.is_busy()
        is_stuck = is_busy and time.monotonic() - running.moved_at > self._progress_s
        status = torch.tensor([is_busy, (self.rank + 1) * is_stuck])
        with self._all():
            dist.all_reduce(status, dist.ReduceOp.MAX, group=self.group)
        any_busy, stuck = status.tolist()
        if stuck:
            raise TimeoutError(f"{what}: rank {stuck - 1} has made no progress for {self._progress_s:g} s")
        return bool(any_busy)


class _Groups:
    """The groups of all meetings of a job, used again once no rank has the meeting any more.

    A group connects all ranks with each other, and is never destroyed, because another rank may still join
    it. So a meeting for each save would use up the sockets.
    """

    def __init__(self) -> None:
        self._made: list[dist.ProcessGroup] = []
        self._free: dict[int, float] = {}  # numbers that no meeting of this rank holds, with their timeouts
        self._asks: dist.ProcessGroup | None = None

    def take(self, meeting: Meeting) -> "tuple[dist.ProcessGroup, finalize[Any, Meeting]]":
        """A group, and what gives it back when the meeting is gone."""
        timeout_s = meeting.timeout_s
        number = self._free_everywhere(timeout_s)
        if number is None:
            number = len(self._made)
            self._made.append(dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s)))
        self._free.pop(number, None)
        return self._made[number], finalize(meeting, self._free.__setitem__, number, timeout_s)

    def _free_everywhere(self, timeout_s: float) -> int | None:
        if not self._made:
            return None
        if self._asks is None:  # whose ranks may come as late as any
            longest = max(timedelta(seconds=timeout_s), world_timeout())
            self._asks = dist.new_group(backend="gloo", timeout=longest)
        free: list[Any] = [None] * dist.get_world_size()
        mine = {number for number, its_s in list(self._free.items()) if its_s == timeout_s}
        dist.all_gather_object(free, mine, group=self._asks)
        return min(set.intersection(*free), default=None)


_of_jobs: WeakKeyDictionary[dist.ProcessGroup, _Groups] = WeakKeyDictionary()  # by the group of all ranks


def _group_of(meeting: Meeting) -> "tuple[dist.ProcessGroup, finalize[Any, Meeting]]":
    return _of_jobs.setdefault(dist.group.WORLD, _Groups()).take(meeting)


class _Running:
    """Work in a thread, and the time of its last progress."""

    def __init__(self, work: Callable[[Tick], Any]) -> None:
        self.moved_at = time.monotonic()
        self._result: Any = None
        self._error: Exception | None = None
        # A daemon: stuck work must not keep the process from exiting.
        self._thread = threading.Thread(target=self._run, args=(work,), daemon=True)
        self._thread.start()

    def is_busy(self) -> bool:
        return self._thread.is_alive()

    def result(self) -> Any:
        """The work's return value. Raises the work's error."""
        if self._error is not None:
            raise self._error
        return self._result

    def _run(self, work: Callable[[Tick], Any]) -> None:
        try:
            self._result = work(self._tick)
        except Exception as error:
            self._error = error

    def _tick(self) -> None:
        self.moved_at = time.monotonic()


def as_here(device: torch.device) -> Context:
    """For `together`, whose thread has a device, a stream and a grad mode of its own: the caller's."""
    stream = torch.cuda.current_stream(device) if device.type == "cuda" else None

    @contextmanager
    def run() -> Iterator[None]:
        with torch.no_grad(), nullcontext() if stream is None else torch.cuda.stream(stream):
            yield

    return run
