"""A collective that lost its partner, in the lanes of a CPU."""

import pytest

from lowband.engine.transport.gloo import PeerLost
from lowband.engine.transport.lane import Lanes, Work


def test_the_loss_of_a_partner_is_raised_where_its_values_are_waited_for() -> None:
    """By the collective itself, by one that it precedes, and by one that has not begun."""
    lanes = Lanes(["inner", "outer"])

    def lost() -> Work:
        yield "inner", []
        raise PeerLost("rank 0 lost its connection to rank 1")

    def two_hops() -> Work:
        yield "inner", []
        yield "outer", []

    handles = [lanes.submit(["inner"], lost()), lanes.submit(["inner", "outer"], two_hops())]
    for handle in handles:
        with pytest.raises(PeerLost, match="rank 0 lost its connection to rank 1"):
            handle.wait()


def test_lanes_are_busy_while_they_run_parts() -> None:
    lanes = Lanes(["inner"])

    def part() -> Work:
        yield "inner", []

    for _ in range(2):
        assert lanes.take_times().busy_s == 0
        lanes.submit(["inner"], part()).wait()
        assert lanes.take_times().busy_s > 0
