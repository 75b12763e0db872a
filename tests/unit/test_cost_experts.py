"""What tokens send to experts of other ranks, against every choice that they can make."""

from collections import Counter
from itertools import combinations

import pytest

from lowband.cost.experts import crossings, hit, in_turns_s
from lowband.spec.mesh import Levels
from lowband.spec.step import Route

CASES = [
    (Levels.fit({}, 4), 8, 2),
    (Levels.fit({"node": 2}, 4), 8, 3),
    (Levels.fit({"package": 2, "node": 4}, 8), 8, 4),
    (Levels.fit({"node": 3}, 6), 6, 1),
    (Levels.fit({}, 1), 4, 2),
]


@pytest.mark.parametrize("route", ["flat", "hops", "merged"])
@pytest.mark.parametrize(("levels", "experts", "top_k"), CASES)
def test_rows_and_pairs_are_the_mean_over_all_choices(
    levels: Levels, experts: int, top_k: int, route: Route
) -> None:
    """Rows and pairs walked one by one, from every rank, for each set of experts of a token."""
    rows, pairs = Counter[str](), Counter[str]()
    choices = [*combinations(range(experts), top_k)]
    for chosen in choices:
        for rank in range(levels.world):
            for expert, walk in (
                (e, _walk(levels, rank, e * levels.world // experts, route)) for e in chosen
            ):
                pairs.update(level for level, *_ in walk)
                if route != "merged":
                    rows.update(level for level, *_ in walk)
                assert 0 <= expert < experts
            if route == "merged":
                goals = {e * levels.world // experts for e in chosen}
                rows.update(
                    level for level, *_ in {s for goal in goals for s in _walk(levels, rank, goal, route)}
                )
    total = len(choices) * levels.world
    found = {each.level: each for each in crossings(levels, route, experts, top_k)}
    assert found.keys() >= rows.keys() | pairs.keys()
    for level, each in found.items():
        assert each.rows * total == rows[level]
        assert each.pairs * total == pairs[level]


def _walk(levels: Levels, at: int, goal: int, route: Route) -> list[tuple[str, int, int]]:
    """The steps from a rank to another: level, from, to."""
    if route == "flat":
        return [] if at == goal else [(levels.common(at, goal), at, goal)]
    steps = []
    for hop in reversed(levels.hops("self", "world")):
        to = at + (hop.coordinate(goal) - hop.coordinate(at)) * hop.stride
        if to != at:
            steps.append((hop.level, at, to))
        at = to
    assert at == goal
    return steps


def test_published_ratios() -> None:
    """DeepSeek-like: of 8 experts of 64 on 4 nodes, 6 rows a token become 2.74; 2 of 384 on 48 stay."""
    assert float(3 * hit(64, 8, 4)) == pytest.approx(2.74, abs=0.005)
    assert 8 * 3 / 4 / float(3 * hit(64, 8, 4)) == pytest.approx(2.19, abs=0.005)
    assert float(15 * hit(256, 8, 16)) == pytest.approx(6.12, abs=0.005)
    assert 2 * 47 / 48 / float(47 * hit(384, 2, 48)) == pytest.approx(1.0, abs=0.02)


@pytest.mark.parametrize("turns", [1, 2, 3, 8])
@pytest.mark.parametrize("ahead", [1, 2, 8])
def test_parts_take_turns(turns: int, ahead: int) -> None:
    """By hand where one of the two decides: the experts, between the first part's way and the last one's
    back; or the links, which are idle for one part's experts alone. In one part nothing is hidden."""
    assert in_turns_s(1, 3.0, 5.0, 2.0, ahead) == 10
    slow_experts = in_turns_s(turns, 0.3, 24.0, 0.2, ahead)
    waits = 0 if ahead > 1 else 0.5 * (turns - 1) / turns  # for the way back, and the next part's there
    assert slow_experts == pytest.approx(24 + 0.5 / turns + waits)
    if turns > 1 and ahead > 1:
        assert in_turns_s(turns, 24.0, 0.3, 24.0, ahead) == pytest.approx(48)
