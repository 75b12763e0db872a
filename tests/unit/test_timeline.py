"""Timelines against closed forms of the papers, and against a simulation of events that shares no code."""

import heapq
from itertools import count
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lowband.cost.timeline import idle_passes, idle_s, timeline
from lowband.errors import UserError
from lowband.spec.schedule import Action, Lists
from lowband.spec.schedules import SCHEDULES, lists

RANKS = range(1, 9)


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("micro_batches", [1, 3, 8, 24])
@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
def test_bubble_of_one_chunk(name: str, ranks: int, micro_batches: int) -> None:
    """2104.04473, section 2.2.1: (p - 1) (F + B) idle beside m (F + B); also for fewer micro-batches."""
    found = timeline(lists(name, ranks, micro_batches, 1), 1.0, 1.1, 0.7)
    assert found.bubble == pytest.approx((ranks - 1) / (micro_batches + ranks - 1))
    assert found.step_s == found.span_s == pytest.approx((micro_batches + ranks - 1) * 2.8)


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("chunks", [2, 3, 4])
@pytest.mark.parametrize("name", ["interleaved", "breadth"])
def test_bubble_of_several_chunks(name: str, ranks: int, chunks: int) -> None:
    """2104.04473, section 2.2.2: 1 / v of it. With fewer micro-batches than ranks, each chunk but the last is
    passed in the time of p."""
    for micro_batches in (1, ranks, 3 * ranks):
        found = timeline(lists(name, ranks, micro_batches, chunks), 1.0, 1.1, 0.7)
        passes = (chunks - 1) * max(micro_batches, ranks) + micro_batches + ranks - 1
        assert found.bubble == pytest.approx(1 - chunks * micro_batches / passes)
        idle = (passes - chunks * micro_batches) / chunks
        assert idle_passes(ranks, micro_batches, chunks) == pytest.approx(idle)
        if micro_batches >= ranks:
            assert found.bubble == pytest.approx((ranks - 1) / (chunks * micro_batches + ranks - 1))


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize(("forward", "input_", "weight"), [(1, 1, 1), (1, 1.2, 0.8), (1, 1, 0.2)])
def test_zb_h1_has_a_third_of_the_bubble(ranks: int, forward: float, input_: float, weight: float) -> None:
    """2401.10241, section 2.3: (p - 1) (F + B - W), where the weight part is not the longest of the three."""
    for micro_batches in (ranks, 3 * ranks):
        found = timeline(lists("zb-h1", ranks, micro_batches, 1), forward, input_, weight)
        idle = (ranks - 1) * (forward + input_ - weight)
        assert found.step_s == pytest.approx(micro_batches * (forward + input_ + weight) + idle)
    assert timeline(lists("zb-h1", ranks, 24, 1), 1, 1, 1).bubble == pytest.approx((ranks - 1) / (71 + ranks))


@pytest.mark.parametrize("ranks", RANKS)
def test_zb_h2_has_none(ranks: int) -> None:
    """2401.10241, section 2.3: (p - 1) (F + B - 2 W) for a rank, from its first action to its last."""
    for weight in (1, 0.7, 0.4):
        found = timeline(lists("zb-h2", ranks, 3 * ranks, 1), 1, 1.2, weight)
        assert found.span_s == pytest.approx(3 * ranks * (2.2 + weight) + (ranks - 1) * (2.2 - 2 * weight))
    assert timeline(lists("zb-h2", ranks, 2 * ranks, 1), 1, 1, 1).span_s == 6 * ranks


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("name", ["zb-v", "dualpipe-v"])
def test_schedules_in_a_vee(name: str, ranks: int) -> None:
    """2401.10241, section 6: where forward, input and weight take equally long, a rank of ZB-V is never idle
    from its first action to its last; ranks only start one after the other."""
    for micro_batches in (2 * ranks, 5 * ranks):
        found = timeline(lists(name, ranks, micro_batches, 2), 1, 1, 1)
        assert found.step_s == 6 * micro_batches + ranks - 1
        if name == "zb-v":
            assert found.span_s == 6 * micro_batches


def test_one_rank_is_never_idle() -> None:
    for name, row in SCHEDULES.items():
        assert timeline(lists(name, 1, 5, row.chunks[0]), 1.0, 1.0, 0.5, 9.0).bubble == 0, name


def test_sends_by_hand() -> None:
    """Two ranks, one micro-batch: forward 1, send 10, forward 2, backward 3 + 4, send 10, backward 5 + 6."""
    found = timeline(lists("1f1b", 2, 1, 1), [1, 2], [5, 3], [6, 4], 10)
    assert found.ends == [[1, 41], [13, 20]]
    assert found.starts == [0, 11] and found.busy_s == [12, 9]
    assert found.step_s == found.span_s == 41
    assert found.bubble == 1 - 21 / 82
    assert timeline(lists("1f1b", 2, 1, 1), [1, 2], [5, 3], [6, 4], [10]).step_s == 41


def test_a_grid_is_one_call() -> None:
    weight, send = np.linspace(0.2, 1.5, 7)[:, None], np.linspace(0, 2, 5)
    grid = timeline(lists("zb-v", 4, 9, 2), 1.0, 1.0, weight, send)
    assert grid.bubble.shape == grid.step_s.shape == (7, 5)
    for i, j in ((0, 0), (3, 2), (6, 4)):
        one = timeline(lists("zb-v", 4, 9, 2), 1.0, 1.0, float(weight[i, 0]), float(send[j]))
        assert (grid.bubble[i, j], grid.step_s[i, j]) == (one.bubble, one.step_s)


def test_lists_that_wait_for_each_other() -> None:
    with pytest.raises(UserError, match="wait for each other"):
        timeline([[Action("backward", 0, 0), Action("forward", 0, 0)]], 1.0, 1.0, 1.0)


def simulated(found: Lists, seconds: dict[tuple[str, int], float], send: float) -> list[list[float]]:
    """When actions end: ranks and messages as events on one clock, in order of time.

    A rank tries its next action whenever something happens to it: it became free, or a message arrived.
    """
    rank_of = {action.stage: rank for rank, of_rank in enumerate(found) for action in of_rank}
    last, tick = max(rank_of), count()
    events = [(0.0, next(tick), rank, None) for rank in range(len(found))]
    inbox: list[set[tuple[str, int, int]]] = [set() for _ in found]
    ends: list[list[float]] = [[] for _ in found]
    running = [False] * len(found)
    while events:
        now, _, rank, arrived = heapq.heappop(events)
        if arrived == "free":
            running[rank] = False
        elif arrived is not None:
            inbox[rank].add(arrived)
        if running[rank] or len(ends[rank]) == len(found[rank]):
            continue
        kind, stage, i = found[rank][len(ends[rank])]
        wanted = {
            "forward": {("output", stage - 1, i)} if stage else set(),
            "weight": {("grad", stage, i)},
        }.get(kind, {("output", stage, i)} | ({("grad", stage + 1, i)} if stage < last else set()))
        if not wanted <= inbox[rank]:
            continue
        end = now + (
            seconds["input", stage] + seconds["weight", stage] if kind == "backward" else seconds[kind, stage]
        )
        ends[rank].append(end)
        running[rank] = True
        message = ("output" if kind == "forward" else "grad", stage, i)
        neighbour = stage + 1 if kind == "forward" else stage - 1
        if kind != "weight":
            heapq.heappush(events, (end, next(tick), rank, message))
            if 0 <= neighbour <= last and rank_of[neighbour] != rank:
                heapq.heappush(events, (end + send, next(tick), rank_of[neighbour], message))
        heapq.heappush(events, (end, next(tick), rank, "free"))
    return ends  # fmt: skip


@settings(max_examples=150, deadline=None)
@given(st.sampled_from(list(SCHEDULES)), st.integers(1, 6), st.integers(1, 13), st.randoms())
def test_against_events_on_a_clock(name: str, ranks: int, micro_batches: int, random: Random) -> None:
    row = SCHEDULES[name]
    chunks = random.randint(row.chunks[0], row.chunks[1] or 4)
    found = lists(name, min(ranks, row.ranks or ranks), micro_batches, chunks)
    count_of = len(found) * chunks
    times = {
        kind: [random.uniform(0.1, 2) for _ in range(count_of)] for kind in ("forward", "input", "weight")
    }
    send = random.choice([0.0, random.uniform(0, 3)])
    by_stage = {(kind, stage): time for kind, of in times.items() for stage, time in enumerate(of)}
    expected = simulated(found, by_stage, send)
    for ends, wanted in zip(timeline(found, *times.values(), send).ends, expected, strict=True):
        assert ends == pytest.approx(wanted)


SPLIT = [name for name, row in SCHEDULES.items() if row.splits]


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(SPLIT), st.integers(1, 5), st.randoms())
def test_idle_seconds_of_long_steps(name: str, ranks: int, random: Random) -> None:
    """For more micro-batches than are simulated, as for fewer; in one array, as one by one."""
    chunks = SCHEDULES[name].chunks[0]
    seconds = [random.uniform(0.3, 2) for _ in range(3)]
    several = np.array([1, ranks, 2 * ranks, 4 * ranks, 4 * ranks + 1, 11 * ranks])
    found = idle_s(name, ranks, several, chunks, *seconds)
    for many, idle in zip(several.tolist(), found, strict=True):
        step_s = timeline(lists(name, ranks, many, chunks), *(s / chunks for s in seconds)).step_s
        assert idle == pytest.approx(step_s - many * sum(seconds), abs=1e-9)
        assert idle_s(name, ranks, many, chunks, *seconds) == pytest.approx(idle, abs=1e-9)
