"""Which rank or link is slow: the rule by hand and on random times, and where a user reads it."""

from collections.abc import Sequence
from math import comb
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lowband.run.slow import CHANCE, SLOWER, chance, named, slowest
from lowband.spec.mesh import SELF, WORLD, Levels
from lowband.spec.records import Outcome, Slow, StepRecord

EIGHT = Levels.fit({"package": 2, "node": 4}, 8)
WIDE = Levels.fit({"package": 2}, 8)  # at the level world each rank has three partners
STEPS = 15


def run(
    levels: Levels,
    seed: int,
    noise: float,
    computing: dict[int, float] | None = None,
    link: dict[int, float] | None = None,
    path: dict[tuple[int, int], float] | None = None,
    steps: int = STEPS,
) -> list[StepRecord]:
    """Steps whose times are 1, times a factor for what is slow, times 1 to 1 + noise.

    Of a message, the end that comes first waits up to twice as long.
    """
    rng = np.random.default_rng(seed)
    records = []
    for step in range(1, steps + 1):
        computed = [
            (computing or {}).get(rank, 1.0) * (1 + rng.uniform(0, noise)) for rank in range(levels.world)
        ]
        took: list[dict[int, float]] = [{} for _ in range(levels.world)]
        for hop in levels.hops(SELF, WORLD):
            for a in range(levels.world):
                for b in hop.partners(a):
                    if a < b:
                        factor = max((link or {}).get(a, 1.0), (link or {}).get(b, 1.0))
                        seconds = factor * (path or {}).get((a, b), 1.0) * (1 + rng.uniform(0, noise))
                        ends = rng.permutation([seconds, seconds * (1 + rng.uniform())])
                        took[a][b], took[b][a] = map(float, ends)
        records.append(record(step, slowest(levels, computed, took)))
    return records


def record(step: int, found: Sequence[object]) -> StepRecord:
    return StepRecord(
        step=step, step_time_s=1, compute_time_s=1, exposed_comm_time_s=0, hidden_comm_time_s=0, tokens=1,
        loss=1, grad_norm=1, sent=(), slowest=tuple(found),
    )  # fmt: skip


@settings(max_examples=20)
@given(st.sampled_from([EIGHT, WIDE]), st.integers(0, 10**6), st.integers(0, 7), st.floats(1.3, 3))
def test_a_slow_rank_is_named(levels: Levels, seed: int, rank: int, factor: float) -> None:
    [found] = named(run(levels, seed, 0.1, computing={rank: factor}))
    assert (found.level, found.ranks, found.steps, found.of_steps) == (SELF, (rank,), STEPS, STEPS)
    assert found.times == pytest.approx(factor, rel=0.12)
    assert str(found).startswith(f"rank {rank} computes {found.times:.1f} times as long as the median of 8 ")


@settings(max_examples=20)
@given(st.sampled_from([EIGHT, WIDE]), st.integers(0, 10**6), st.integers(0, 7), st.floats(2, 6))
def test_a_rank_s_slow_link_is_named(levels: Levels, seed: int, rank: int, factor: float) -> None:
    """By the pairs of several levels that have the rank in common, or by all pairs of one level."""
    [found] = named(run(levels, seed, 0.1, link={rank: factor}))
    assert (found.level != SELF, found.ranks) == (True, (rank,))


@settings(max_examples=20)
@given(st.sampled_from([EIGHT, WIDE]), st.integers(0, 10**6), st.data())
def test_a_slow_path_is_named(levels: Levels, seed: int, data: st.DataObject) -> None:
    """Between two ranks only: neither of them has another slow message."""
    hop = data.draw(st.sampled_from(levels.hops(SELF, WORLD)))
    a = data.draw(st.integers(0, 7))
    b = data.draw(st.sampled_from([partner for partner in hop.partners(a) if partner != a]))
    pair = min(a, b), max(a, b)
    [found] = named(run(levels, seed, 0.1, path={pair: 2.0}))
    assert (found.level, found.ranks) == (hop.level, pair)
    assert str(found).startswith(f"the messages between ranks {pair[0]} and {pair[1]} (level {hop.level}) ")


@pytest.mark.parametrize(
    ("levels", "path", "late"),
    [
        (EIGHT, (0, 1), {(1, 3): 1.6}),  # one message, on the next level
        (WIDE, (0, 1), {(1, 3): 1.8, (1, 5): 1.8, (1, 7): 1.8}),  # all of one of the two
        (WIDE, (0, 2), {(1, 3): 2.4, (1, 5): 2.4, (1, 7): 2.4}),  # all of another rank, which waited for one
    ],
)
def test_who_comes_late_because_of_a_slow_path_is_not_named(
    levels: Levels, path: tuple[int, int], late: dict[tuple[int, int], float]
) -> None:
    [found] = named(run(levels, 0, 0.1, path={path: 4.5, **late}))
    assert found.ranks == path


def test_a_rank_and_a_link_at_once() -> None:
    found = named(run(EIGHT, 0, 0.1, computing={2: 2.0}, path={(4, 5): 3.0}))
    assert [(one.level, one.ranks) for one in found] == [(SELF, (2,)), ("package", (4, 5))]


@settings(max_examples=20)
@given(st.sampled_from([EIGHT, WIDE, Levels.fit({}, 2), Levels.fit({}, 1)]), st.integers(0, 10**6))
def test_little_noise_names_nothing(levels: Levels, seed: int) -> None:
    """Whatever is the slowest, it is below the limit."""
    assert named(run(levels, seed, min(SLOWER.values()) - 1.001)) == ()


def test_much_noise_names_nothing_as_often_as_chance_allows() -> None:
    """Times that differ by up to five times, without a cause: below CHANCE in each of a run's four tests."""
    found = [seed for seed in range(60) if named(run(WIDE, seed, 4.0))]
    assert len(found) <= 1 + 60 * 4 * CHANCE


@pytest.mark.parametrize(("k", "m", "n"), [(1, 1, 2), (15, 16, 2), (10, 12, 4), (3, 3, 8), (0, 5, 3)])
def test_chance_is_the_binomial_tail_of_each_of_n(k: int, m: int, n: int) -> None:
    tail = sum(comb(m, i) * (1 / n) ** i * (1 - 1 / n) ** (m - i) for i in range(k, m + 1))
    assert chance(k, m, n) == pytest.approx(min(1.0, n * tail), rel=1e-12)


def test_one_slow_step_is_no_slow_rank() -> None:
    """As a pause is, and as two ranks that take turns are."""
    paused = [*run(EIGHT, 0, 0.1, steps=9), *run(EIGHT, 1, 0.1, computing={3: 30.0}, steps=1)]
    assert named(paused) == ()
    turns = [one for rank in range(8) for one in run(EIGHT, rank, 0.1, computing={rank: 2.0}, steps=2)]
    assert named(turns) == ()


def test_only_the_last_steps_count() -> None:
    was = run(EIGHT, 0, 0.1, computing={3: 2.0}, steps=200)
    assert named(was) != ()
    assert named([*was, *run(EIGHT, 1, 0.1, steps=50)]) == ()


def test_what_has_no_times_is_left_out() -> None:
    """NCCL's messages, a ring's, and pairs of which one end alone has a time."""
    assert [one.level for one in slowest(EIGHT, [1.0] * 8, [{}] * 8)] == [SELF]
    assert [one.level for one in slowest(EIGHT, [1.0] * 8, [{1: 1.0}, *[{}] * 7])] == [SELF]


def test_records_of_earlier_versions_have_nothing_slow(tmp_path: Path) -> None:
    line = record(1, ()).model_dump(mode="json")
    del line["slowest"]
    assert StepRecord.model_validate(line).slowest == ()
    assert Outcome(status="ok", steps=1).slow == ()
    slow = Slow(level="node", ranks=(3, 4), times=2.04, compared=12, steps=9, of_steps=10)
    path = tmp_path / "outcome.json"
    path.write_text(Outcome(status="ok", steps=1, slow=(slow,)).to_json())
    assert str(Outcome.read_json(path).slow[0]) == (
        "the messages between ranks 3 and 4 (level node) take 2.0 times as long as the median of 12 "
        "in 9 of 10 steps"
    )
