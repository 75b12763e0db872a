"""Several ways of one step, in turns: what else the machine does falls on all of them alike."""

import resource
import time
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import TypeVar

import torch.distributed as dist

Way = TypeVar("Way", bound=Hashable)
T = TypeVar("T")


def in_turns(
    ways: Mapping[Way, Callable[[], T]], warmup: int, steps: int, keeps_first: bool = False
) -> dict[Way, list[T]]:
    """By way, what this rank's call of each step returned; all ranks begin each call together.

    keeps_first: whether the first step, which may compile, is there too, before those after the warm-up
    """
    found: dict[Way, list[T]] = {way: [] for way in ways}
    for step in range(warmup + steps):
        for way, call in ways.items():
            dist.barrier()
            result = call()
            if step >= warmup or (keeps_first and step == 0):
                found[way].append(result)
    return found


def by_step(
    by_rank: Sequence[Mapping[Way, Sequence[T]]], first: int = 1
) -> Iterator[tuple[Way, int, tuple[T, ...]]]:
    """Way, number of the step and what each rank found, of all ranks' `in_turns`. first: of the numbers"""
    for way in by_rank[0]:
        for step, found in enumerate(zip(*(of_rank[way] for of_rank in by_rank), strict=True), first):
            yield way, step, found


def timed(
    step: Callable[[], object], wait: Callable[[], object] = lambda: None
) -> Callable[[], tuple[float, float]]:
    """`step`, returning its seconds and this process's processor seconds; wait: for the device"""

    def call() -> tuple[float, float]:
        wait()
        begun, used = time.perf_counter(), _processor_s()
        step()
        wait()
        return time.perf_counter() - begun, _processor_s() - used

    return call


def _processor_s() -> float:
    """Of all threads of this process."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime
