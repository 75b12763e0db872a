"""How long messages took: by the end that came later, whoever that is, and of the largest ones only."""

from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from started import run

from lowband import Topology
from lowband.engine.transport import gloo
from lowband.engine.transport.gloo import Message, MessageTimes
from lowband.run.on_ranks import on_ranks

LATE_S = 2.0


class Clock:
    """A rank's clock, which goes on by LATE_S whenever rank `late` begins: once both others wait for it."""

    def __init__(self, late: int) -> None:
        self._late, self._store = late, dist.distributed_c10d._get_default_store()
        wait = gloo.wait

        def say_and_wait(works: list[dist.Work | None], partner: int, name: str) -> None:
            if partner == late:
                self._store.set(f"{name}: waited for by {dist.get_rank()}", "")
            wait(works, partner, name)

        gloo.wait, gloo.time = say_and_wait, self

    def perf_counter(self) -> float:
        return LATE_S * self._store.add("begun late", 0)

    def be_late(self, name: str) -> None:
        others = {0, 1, 2} - {self._late}
        self._store.wait([f"{name}: waited for by {rank}" for rank in others], timedelta(seconds=60))
        self._store.add("begun late", 1)


def times_with_one_late(late: int) -> dict[int, float]:
    """In a group of three: the last exchange of several."""
    clock = Clock(late)
    topology = Topology({})
    [bound] = topology.along("data").hops("self", "world")
    ours, theirs = [torch.ones(64)] * 3, [torch.empty(64) for _ in range(3)]
    taken = {}
    for name in ("opens the connections", "shows who is late", "is timed"):
        dist.barrier()
        if dist.get_rank() == late and name != "opens the connections":
            clock.be_late(name)
        bound.exchange(ours, theirs, name)
        taken = topology.along("data").message_times.take()
    assert topology.along("data").message_times.take() == {}
    return taken


@pytest.mark.parametrize("late", [0, 1, 2])
def test_the_end_that_comes_later_does_not_wait_for_the_other(late: int) -> None:
    """Nor does either of the two others, who wait for it last: it was late before."""
    took = on_ranks(3, times_with_one_late, late)
    a, b = (rank for rank in range(3) if rank != late)
    assert took[a] == {late: LATE_S, b: 0.0}
    assert took[b] == {late: LATE_S, a: 0.0}
    assert took[late] == {a: 0.0, b: 0.0}


def test_the_shortest_of_the_largest_counts() -> None:
    times = MessageTimes()
    for message in ((1, 100, 0.3), (2, 100, 0.1), (1, 100, 0.2), (2, 10, 0.01), (1, 99, 0.1), (2, 200, 0.4)):
        times.add(Message(*message), waited_s=0.0)
    assert times.take() == {1: 0.2, 2: 0.4}


def test_a_run_records_what_was_slowest(tmp_path: Path) -> None:
    """Of each step: a rank's computing and, of two levels with two pairs each, a pair of each."""
    for step in run(tmp_path, steps=3, warmup_steps=1).read_steps():
        of_level = {one.level: one for one in step.slowest}
        assert of_level["self"].compared == 4
        assert of_level["self"].seconds <= step.step_time_s
        pairs = {level: one for level, one in of_level.items() if level != "self"}
        assert {(len(one.ranks), one.compared) for one in pairs.values()} == {(2, 2)}
        assert all(0 < one.median_s <= one.seconds < step.step_time_s for one in of_level.values())
