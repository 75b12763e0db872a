"""A meeting's group connects all ranks with each other: one that no rank uses any more is used again."""

import torch.distributed as dist

from lowband.engine.transport.meeting import Meeting
from lowband.run.on_ranks import on_ranks


def groups() -> int:
    return len(dist.distributed_c10d._world.pg_map)


def many_meetings() -> tuple[list[int], list[list[int]]]:
    counts, said = [], []
    for number in range(6):
        meeting = Meeting(300.0)
        said.append(meeting.everyone(number))
        del meeting
        counts.append(groups())
    return counts, said


def one_that_a_rank_keeps() -> tuple[bool, bool]:
    first, other = Meeting(300.0), Meeting(200.0)
    before = first.group
    kept = first if dist.get_rank() == 1 else None
    del first
    second = Meeting(300.0)
    second.everyone(kept is None)
    return second.group is before, second.group is other.group


def test_a_meeting_for_each_save_makes_no_group_for_each() -> None:
    for counts, said in on_ranks(4, many_meetings):
        assert counts[1:] == [counts[1]] * 5
        assert said == [[number] * 4 for number in range(6)]


def test_a_group_is_not_used_by_two_meetings() -> None:
    assert on_ranks(2, one_that_a_rank_keeps) == [(False, False)] * 2
