"""A sample of the campaign, with large faults. The whole one is `python -m tests.stragglers --trials 100`."""

import os

import pytest

from lowband.box import links
from lowband.spec.records import Slow
from tests.stragglers.draw import FAULTS, Trial, levels, trial
from tests.stragglers.trial import Running, is_right

needs_links = pytest.mark.skipif(
    os.geteuid() != 0 or bool(links.missing()), reason="needs root and shaped links"
)


SAMPLE = (
    Trial(0, "rank", "hpz", 4, 4, (2,), "", 2.0),
    Trial(1, "path", "hpz", 4, 4, (1, 3), "node", 3.0),
    Trial(2, "none", "hpz", 4, 4, (), "", 1.0),
)


@pytest.mark.timed("names who is slow from real times")
@needs_links
def test_what_is_slow_is_named() -> None:
    """All at once, as in the campaign: they compute for 4 s each, and wait for more than a minute."""
    running = [Running(drawn) for drawn in SAMPLE]
    ended = [each.end() for each in running]
    for drawn, (outcome, steps) in zip(SAMPLE, ended, strict=True):
        assert outcome.status == "ok", outcome
        assert is_right(drawn, outcome.slow), (drawn, outcome.slow, [step.slowest for step in steps])


def test_what_is_right() -> None:
    def named(level: str, *ranks: int) -> tuple[Slow, ...]:
        return (Slow(level=level, ranks=ranks, times=2, compared=4, steps=9, of_steps=9),)

    rank, link = (Trial(0, kind, "hpz", 8, 8, (5,), "", 2.0) for kind in ("rank", "link"))
    assert is_right(rank, named("self", 5))
    assert not any(is_right(rank, wrong) for wrong in ((), named("self", 4), named("node", 5)))
    assert is_right(link, named("node", 5)) and is_right(link, named("package", 4, 5))
    assert not is_right(link, named("node", 5, 7))  # it has three partners there
    assert not is_right(link, named("package", 6, 7))
    assert not is_right(link, named("node", 5) + named("self", 5))
    path = Trial(0, "path", "hpz", 8, 8, (5, 7), "node", 2.0)
    assert is_right(path, named("node", 5, 7))
    assert not is_right(path, named("node", 5)) and not is_right(path, named("node", 3, 5))
    assert is_right(trial(0, faulty=False), ()) and not is_right(trial(0, faulty=False), named("self", 5))


def test_faults_take_turns_and_are_within_the_job() -> None:
    drawn = [trial(seed, faulty=True) for seed in range(200)]
    assert {one.kind for one in drawn} == set(FAULTS)
    assert all(0 <= rank < one.ranks for one in drawn for rank in one.victim)
    for one in drawn:
        if one.kind == "path":
            [hop] = [
                hop for hop in levels(one.ranks, one.node).hops("self", "world") if hop.level == one.level
            ]
            assert set(one.victim) <= set(hop.partners(one.victim[0]))
    assert len({(one.kind, one.victim, one.scheme, one.ranks) for one in drawn}) > 60
