"""Which step exchanges which part of the weights: pure arithmetic, for any period, fragments and delay."""

from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lowband.errors import UserError
from lowband.spec.mesh import Levels
from lowband.spec.scheme import Scheme
from lowband.spec.sync import Sync
from tests.refused import refusal


@st.composite
def syncs(draw) -> Sync:
    gap, fragments = draw(st.integers(1, 8)), draw(st.integers(1, 6))
    every = gap * fragments
    return Sync(beyond="node", every=every, fragments=fragments, delay=draw(st.integers(0, every)), mix=0.5)


def events(sync: Sync, first: int, last: int) -> list[tuple[int, str, int]]:
    """(step, what, fragment) after each of the steps, in the order in which the engine acts."""
    found = []
    for step in range(first, last + 1):
        place = (step - 1) % sync.every + 1
        if (fragment := sync.arrives(place)) is not None:
            found.append((step, "arrives", fragment))
        if (fragment := sync.starts(place)) is not None:
            found.append((step, "starts", fragment))
            if not sync.delay:
                found.append((step, "arrives", fragment))
    return found


@settings(max_examples=300, deadline=None, database=None)
@given(sync=syncs(), first=st.integers(1, 200))
def test_in_any_period_each_fragment_starts_once_and_arrives_once(sync: Sync, first: int) -> None:
    found = Counter((what, fragment) for _, what, fragment in events(sync, first, first + sync.every - 1))
    assert found == {(what, f): 1 for what in ("starts", "arrives") for f in range(sync.fragments)}


@settings(max_examples=300, deadline=None, database=None)
@given(sync=syncs())
def test_each_start_arrives_after_the_delay_and_before_its_fragments_next_start(sync: Sync) -> None:
    on_its_way: dict[int, int] = {}  # fragment -> step of its start
    most, arrived = 0, []
    for step, what, fragment in events(sync, 1, 4 * sync.every):
        if what == "starts":
            assert fragment not in on_its_way
            assert (
                step == (fragment + 1) * sync.every // sync.fragments + (step - 1) // sync.every * sync.every
            )
            on_its_way[fragment] = step
        elif fragment in on_its_way:
            assert step == on_its_way.pop(fragment) + sync.delay
            arrived.append(fragment)
        else:
            assert step <= sync.every  # nothing has started yet
        if sync.delay:
            most = max(most, len(on_its_way))
    assert arrived == [i % sync.fragments for i in range(len(arrived))]  # in the order of their starts
    assert most == sync.most_in_flight([1] * sync.fragments)


@settings(max_examples=300, deadline=None, database=None)
@given(sync=syncs(), stop=st.integers(0, 100))
def test_the_place_in_the_period_is_all_that_a_checkpoint_needs(sync: Sync, stop: int) -> None:
    whole, place = events(sync, 1, 200), stop % sync.every
    resumed = [(step - place + stop, what, f) for step, what, f in events(sync, place + 1, place + 100)]
    assert [event for event in whole if stop < event[0] <= stop + 100] == resumed


@settings(max_examples=300, deadline=None, database=None)
@given(sync=syncs(), units=st.lists(st.integers(0, 50), min_size=1, max_size=20))
def test_fragments_divide_the_units(sync: Sync, units: list[int]) -> None:
    of = [sync.fragment_of(unit) for unit in range(len(units))]
    sizes = [sum(n for n, f in zip(units, of, strict=True) if f == g) for g in range(sync.fragments)]
    assert sum(sizes) == sum(units)
    assert max(Counter(of).values()) - min(Counter(of)[f] for f in range(sync.fragments)) <= 1
    on_its_way, most = set(), 0
    for _, what, fragment in events(sync, 1, 3 * sync.every) if sync.delay else []:
        (on_its_way.add if what == "starts" else on_its_way.discard)(fragment)
        most = max(most, sum(sizes[f] for f in on_its_way))
    assert sync.most_in_flight(units) == most


@settings(max_examples=300, deadline=None, database=None)
@given(sync=syncs(), lane=st.lists(st.floats(0, 20), min_size=6, max_size=6), step_s=st.floats(0.1, 5))
def test_what_the_predictor_counts_as_exposed(sync: Sync, lane: list[float], step_s: float) -> None:
    """Σ max(0, x - min(delay, gap) c): exact up to a delay of the gap, an upper bound beyond it."""
    now, free, ends, waited = 0.0, 0.0, {}, Counter()
    periods = 40
    for step in range(1, periods * sync.every + 1):
        now += step_s
        place, period = (step - 1) % sync.every + 1, (step - 1) // sync.every
        arriving, starting = sync.arrives(place), sync.starts(place)
        for fragment in [arriving] if arriving in ends else []:
            waited[period] += max(0.0, ends[fragment] - now)
            now = max(now, ends.pop(fragment))
        if starting is not None:
            free = ends[starting] = max(free, now) + lane[starting]
            if not sync.delay:
                waited[period] += ends[starting] - now
                now = ends.pop(starting)
    formula = sum(max(0.0, x - min(sync.delay, sync.gap) * step_s) for x in lane[: sync.fragments])
    mean = sum(waited[period] for period in range(10, periods)) / (periods - 10)
    if sync.delay <= sync.gap:
        assert mean == pytest.approx(formula, abs=1e-6)
    else:
        assert mean <= formula + sum(lane[: sync.fragments]) / 10 + 1e-6


@settings(max_examples=200, deadline=None, database=None)
@given(
    partners=st.sampled_from(["exponential", "ring"]), half=st.integers(1, 40), exchange=st.integers(0, 300)
)
def test_each_replica_sends_to_one_and_receives_from_one(partners: str, half: int, exchange: int) -> None:
    sync, replicas = Sync(beyond="node", every=1, partners=partners), 2 * half
    to, source = zip(*(sync.partner(i, replicas, exchange) for i in range(replicas)), strict=True)
    assert sorted(to) == sorted(source) == list(range(replicas))
    assert all(source[other] == i != other for i, other in enumerate(to))
    again = [sync.partner(i, replicas, exchange + sync.turns(replicas)) for i in range(replicas)]
    assert again == list(zip(to, source, strict=True))


def mixed(partners: str, replicas: int, exchanges: int) -> np.ndarray:
    """What part of each replica's first weights each one has after so many exchanges."""
    sync, parts = Sync(beyond="node", every=1, partners=partners), np.eye(replicas)
    for exchange in range(exchanges):
        parts = (parts + parts[[sync.partner(i, replicas, exchange)[1] for i in range(replicas)]]) / 2
    return parts


@pytest.mark.parametrize("log", range(6))
def test_the_exponential_graph_averages_exactly_in_one_cycle(log: int) -> None:
    """Ying et al., arXiv 2110.13363: so it does if the number of replicas is a power of two."""
    replicas = 2**log
    assert (mixed("exponential", replicas, log) == 1 / replicas).all()


@pytest.mark.parametrize(("partners", "replicas"), [("exponential", 7), ("ring", 10)])
def test_weights_get_around_in_the_end_and_their_mean_stays(partners: str, replicas: int) -> None:
    for exchanges in (1, 2, 3, 200):
        assert mixed(partners, replicas, exchanges).sum(axis=0) == pytest.approx(1)
    assert mixed(partners, replicas, 200) == pytest.approx(1 / replicas)


def test_one_replica_has_no_partner_but_itself() -> None:
    assert Sync(beyond="node", every=1, partners="exponential").partner(0, 1, 5) == (0, 0)


def test_with_one_partner_nothing_that_training_does_meanwhile_is_lost() -> None:
    assert Sync.parse({"beyond": "node", "every": 1, "delay": 1, "partners": "ring"}, "sync").delay == 1


@pytest.mark.parametrize(
    ("sync", "part"),
    [
        ({"delay": 7}, "delay (7) is longer than the period (allowed: 0 to 6)"),
        ({"delay": 6}, "no step would count (allowed: delay below 6, or mix above 0)"),
        ({"delay": -1}, "sync.delay: Input should be greater than or equal to 0"),
        ({"mix": 1}, "sync.mix: Input should be less than 1"),
        ({"fragments": 4}, "fragments (4) do not divide the period of 6 steps (allowed: 1, 2, 3, 6)"),
        ({"fragments": 0}, "sync.fragments: Input should be greater than 0"),
        (
            {"partners": "ring", "mix": 0.5},
            "partners ring: replicas average weights, by twos",
        ),
        (
            {"partners": "exponential", "outer": "momentum", "momentum": 0.9},
            "partners exponential: replicas",
        ),
        ({"partners": "some"}, "sync.partners: Input should be 'all', 'exponential' or 'ring'"),
    ],
)
def test_what_does_not_fit_is_refused_in_one_line(sync: dict[str, object], part: str) -> None:
    assert part.removeprefix("sync.") in refusal(Sync.parse, {"beyond": "node", "every": 6, **sync}, "sync")


def test_a_sync_without_the_later_keys_is_written_as_before() -> None:
    plain = Sync(beyond="node", every=6, outer="nesterov", learning_rate=0.7, momentum=0.9)
    assert list(plain.model_dump()) == ["beyond", "every", "outer", "learning_rate", "momentum"]
    late = plain.model_copy(update={"delay": 2})
    assert set(late.model_dump()) - set(plain.model_dump()) == {"delay"}
    assert Sync.parse(late.model_dump(), "sync") == late


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"learning_rate": 0.7}, "outer average has neither learning_rate nor momentum"),
        ({"momentum": 0.9}, "outer average has neither learning_rate nor momentum"),
        ({"outer": "nesterov"}, "outer nesterov has a momentum above 0"),
        (
            {"every": 6, "fragments": 4},
            "fragments .4. do not divide the period of 6 steps .allowed: 1, 2, 3, 6",
        ),
        ({"delay": 5}, "delay .5. is longer than the period .allowed: 0 to 4"),
        (
            {"partners": "ring", "outer": "momentum", "momentum": 0.9},
            "partners ring: replicas average weights",
        ),
        ({"partners": "ring", "mix": 0.5}, "partners ring: replicas average weights"),
        ({"delay": 4}, "no step would count"),
    ],
)
def test_what_replicas_cannot_agree_on_is_refused(options: dict[str, Any], says: str) -> None:
    with pytest.raises(UserError, match=says):
        Sync(**{"beyond": "node", "every": 4, **options})


@pytest.mark.parametrize("options", [{"delay": 4, "mix": 0.5}, {"delay": 4, "partners": "ring"}])
def test_an_exchange_may_take_the_whole_period(options: dict[str, Any]) -> None:
    """Where a replica keeps a part of its own steps."""
    assert Sync(beyond="node", every=4, **options).delay == 4


@pytest.mark.parametrize(
    ("partners", "beyond", "ranks", "says"),
    [
        ("ring", "node", 12, "sync.partners ring: 3 replicas do not make pairs"),
        ("ring", "package", 8, "sync.partners ring: 2 levels lie between replicas"),
        ("exponential", "package", 8, "sync.partners exponential: 2 levels lie between replicas"),
        ("all", "world", 8, "sync.beyond .world. must be the optimizer's level"),
        ("all", "self", 8, "sync.beyond .self. must be the optimizer's level"),
    ],
)
def test_replicas_that_cannot_meet_are_refused(partners: Any, beyond: str, ranks: int, says: str) -> None:
    sync = Sync(beyond=beyond, every=4, partners=partners)
    inside = Scheme(name="s", weights="package", grads="package", optim="package", sync=sync)
    with pytest.raises(UserError, match=says):
        inside.check(Levels.fit({"package": 2, "node": 4}, ranks))


@pytest.mark.parametrize(
    ("partners", "beyond", "ranks"),
    [("ring", "node", 8), ("exponential", "node", 12), ("all", "package", 12), ("all", "node", 12)],
)
def test_replicas_that_can_meet_are_not(partners: Any, beyond: str, ranks: int) -> None:
    sync = Sync(beyond=beyond, every=4, partners=partners)
    inside = Scheme(name="s", weights="package", grads="package", optim="package", sync=sync)
    inside.check(Levels.fit({"package": 2, "node": 4}, ranks))
