"""Groups and zones for sequences of unequal lengths, beside every assignment that there is."""

from itertools import product

import numpy as np
import pytest

from lowband.errors import UserError
from lowband.predict.search.lengths import LengthPlan, best_of_one_degree, cuts, fastest, plan_lengths
from lowband.predict.search.lengths_step import BUCKETS, Costs, busiest, micro_step

DEGREES = [1, 2, 4]
EXCHANGE = {1: 0.0, 2: 3e-4, 4: 4e-4, 8: 5e-4, 16: 4e-3, 32: 5e-3, 64: 6e-3}


def costs(room, fixed_s=0.0):
    def seconds(degree):
        return lambda n: (1e-7 * n.astype(float) ** 2 + 1e-3 * n + EXCHANGE[degree] * n) / degree

    return Costs({degree: seconds(degree) for degree in EXCHANGE}, room, fixed_s)


def long_tailed(count, seed):
    """Lengths from a lognormal distribution, median 350 and sigma 1.4: a stated one, of no data set."""
    return np.random.default_rng(seed).lognormal(np.log(350), 1.4, count).astype(int).clip(16).tolist()


def every_assignment(lengths, ranks, cost, degrees, zones):
    """Seconds of the best of all assignments of sequences to places; infinity if none has room."""
    places = [(d, first) for d in degrees for first in range(0, ranks, d)]
    seconds = {d: cost.seconds[d](np.array(lengths)) for d in degrees}
    best = np.inf
    for chosen in product(places, repeat=len(lengths)):
        used = set(chosen)
        if not zones and sum(d for d, _ in used) != len({r for d, f in used for r in range(f, f + d)}):
            continue
        busy, held = np.zeros(ranks), np.zeros(ranks)
        for i, (d, first) in enumerate(chosen):
            busy[first : first + d] += seconds[d][i]
            held[first : first + d] += lengths[i] / d
        if held.max() <= cost.room:
            best = min(best, busy.max())
    return best


def check(plan: LengthPlan, lengths, ranks, cost, zones):
    """Each sequence once; room on every rank; places aligned and, of groups, apart; seconds added up."""
    assert sorted(one.length for step in plan.steps for one in step.placed) == sorted(lengths)
    for step in plan.steps:
        held = np.zeros(ranks)
        for one in step.placed:
            assert one.first % one.degree == 0 and one.first + one.degree <= ranks
            held[one.first : one.first + one.degree] += one.length / one.degree
        assert held.max() <= cost.room * (1 + 1e-9)
        assert step.seconds == busiest(step.placed, ranks)
        used = {(one.degree, one.first) for one in step.placed}
        if not zones:
            assert sum(d for d, _ in used) == len({r for d, f in used for r in range(f, f + d)})
    assert plan.seconds == pytest.approx(sum(step.seconds + cost.fixed_s for step in plan.steps), rel=1e-12)


@pytest.mark.parametrize("zones", [True, False])
@pytest.mark.parametrize("seed", range(4))
def test_the_milp_finds_the_best_of_all_assignments(seed, zones):
    lengths, cost = long_tailed(5, seed), costs(room=max(long_tailed(5, seed)) / 2)
    found = micro_step(lengths, 4, cost, DEGREES, zones)
    best = every_assignment(lengths, 4, cost, DEGREES, zones)
    assert (np.inf if found is None else found.seconds) == pytest.approx(best, rel=1e-6)


@pytest.mark.parametrize("zones", [True, False])
def test_micro_steps_are_the_best_of_those_that_are_tried(zones):
    lengths, cost = [900, 700, 400, 300, 200], costs(room=420, fixed_s=0.05)
    found = plan_lengths(lengths, 4, cost, DEGREES, zones)
    best = min(
        sum(every_assignment(step, 4, cost, DEGREES, zones) + cost.fixed_s for step in cut)
        for count in (2, 3)
        for cut in cuts(lengths, count)
    )
    check(found, lengths, 4, cost, zones)
    assert found.seconds == pytest.approx(best, rel=1e-6)


@pytest.mark.parametrize("zones", [True, False])
def test_one_micro_step_more_than_the_fewest_may_be_faster(zones):
    """Ranks have room for 10 tokens each, so that 8, 8 and 4 fill both, if the 4 are on both: 8 + 25 x 4
    seconds; in groups, which do not overlap, all are on both. In two micro-steps each is alone: 8 + 8."""
    slow = Costs({1: lambda n: 1.0 * n, 2: lambda n: 25.0 * n}, room=10)
    found = plan_lengths([8, 8, 4], 2, slow, [1, 2], zones)
    check(found, [8, 8, 4], 2, slow, zones)
    assert (len(found.steps), found.seconds) == (2, pytest.approx(16))


@pytest.mark.wide
def test_a_batch_of_512_on_64_ranks_is_a_small_milp():
    lengths, degrees = long_tailed(512, 0), list(EXCHANGE)
    cost = costs(room=3000, fixed_s=0.5)
    plans = {zones: plan_lengths(lengths, 64, cost, degrees, zones) for zones in (True, False)}
    for zones, plan in plans.items():
        check(plan, lengths, 64, cost, zones)
        assert plan.integers <= len(degrees) * (BUCKETS + 1)
    assert plans[True].seconds < best_of_one_degree(lengths, 64, cost, degrees).seconds


@pytest.mark.parametrize("seed", range(3))
def test_never_slower_than_one_degree_for_all(seed):
    lengths, cost = long_tailed(40, seed), costs(room=2000, fixed_s=0.1)
    degrees = [1, 2, 4, 8]
    found = fastest(lengths, 8, cost, degrees)
    check(found, lengths, 8, cost, True)
    for degree in degrees:
        if max(lengths) <= degree * cost.room:
            assert found.seconds <= plan_lengths(lengths, 8, cost, [degree], False).seconds


def test_micro_steps_are_cut_as_evenly_as_runs_can_be():
    runs, dealt = cuts([5, 4, 3, 3, 2, 1], 3)
    assert runs == [[5], [4, 3], [3, 2, 1]]
    assert sorted(map(sum, dealt)) == [6, 6, 6]


@pytest.mark.parametrize("zones", [True, False])
def test_without_a_limit_of_memory_one_micro_step_is_enough(zones):
    lengths, cost = long_tailed(30, 1), costs(room=np.inf, fixed_s=1.0)
    found = plan_lengths(lengths, 4, cost, DEGREES, zones)
    check(found, lengths, 4, cost, zones)
    assert len(found.steps) == 1


def test_a_sequence_that_fits_nowhere_is_refused():
    with pytest.raises(UserError, match="a sequence of 500 tokens fits nowhere: 4 ranks have room for 400"):
        fastest([500, 10], 4, costs(room=100), DEGREES)
