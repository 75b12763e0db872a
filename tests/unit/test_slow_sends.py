"""Lists for slow sends: legal, in their memory, never longer than published ones, shorter where they can."""

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

import lowband
from lowband.cost.player import Seconds
from lowband.cost.slow_sends import best_published, compared, search
from lowband.cost.timeline import timeline
from lowband.errors import UserError
from lowband.spec.schedule import check, count, peak, stages
from lowband.spec.schedules import lists

TIMES = st.sampled_from([0.2, 0.5, 1.0, 1.7])


@settings(max_examples=60, deadline=None)
@given(
    st.integers(1, 5), st.integers(1, 9), TIMES, TIMES, TIMES, st.sampled_from([0.0, 0.1, 0.5, 1.0, 3.0]),
    st.sampled_from([None, 1, 1.5, 2, 3.5, 20]),
)  # fmt: skip
@example(ranks=4, micro_batches=6, forward=0.2, input_=1.7, weight=1.0, send=0.1, memory=3.5)
def test_lists_are_legal_and_within_memory(ranks, micro_batches, forward, input_, weight, send, memory):
    times = Seconds(forward, input_, weight, send)
    found = search(ranks, micro_batches, times, memory)
    check(found.lists)
    chunks, left = divmod(stages(found.lists), ranks)
    assert left == 0
    assert count(found.lists, "forward") == [chunks * micro_batches] * ranks
    assert max(peak(found.lists)) <= (ranks if memory is None else memory) * chunks
    again = timeline(found.lists, *(s / chunks for s in (forward, input_, weight)), send)
    assert found.step_s == pytest.approx(float(again.step_s), rel=1e-9)  # what it played is its timeline
    assert found.step_s <= best_published(ranks, micro_batches, times, memory).step_s * (1 + 1e-9)
    assert found.lists == lowband.lists_for_sends(ranks, micro_batches, *times, memory)


def test_it_is_shorter_where_sends_are_slow() -> None:
    """At the memory of 1F1B: than each of the three, and by how much for some of them."""
    for ranks, micro_batches, send, gain in (
        (4, 8, 0.1, 0.01), (4, 8, 0.25, 0.02), (4, 8, 1.0, 0.01), (4, 16, 0.25, 0.01),
        (8, 8, 0.1, 0.07), (8, 8, 0.5, 0.02), (8, 16, 0.25, 0.02), (8, 16, 1.0, 0.03),
    ):  # fmt: skip
        row = compared(ranks, micro_batches, Seconds(1, 1, 1, send))
        named = [row["bubble_1f1b"], row["bubble_zb_h1"], row["bubble_zb_v"], row["bubble_published"]]
        assert row["bubble_found"] < min(named) - gain
        assert row["found"] == "searched"


def test_published_lists_are_returned_where_they_are_best() -> None:
    """Nothing shorter than zb-v is found here."""
    found = search(4, 16, Seconds(1, 1, 1, 0.5), 4)
    assert found.name == "zb-v"
    assert found.lists == lists("zb-v", 4, 16, 2)
    assert compared(4, 16, Seconds(1, 1, 1, 0.5), 3)["bubble_1f1b"] is None  # it needs the memory of 4


def test_the_least_memory_is_one_micro_batch_after_the_other() -> None:
    """Forward and back through all ranks, then the first one's weight part: nothing can overlap."""
    found = search(3, 4, Seconds(1, 1, 1, 0.5), 1)
    assert max(peak(found.lists)) == 1
    assert found.step_s == pytest.approx(4 * (3 * (1 + 1) + 2 * 2 * 0.5 + 1))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ((0, 1, 1, 1, 1, 0), "a schedule for 0 ranks"),
        ((1, 0, 1, 1, 1, 0), "a schedule for 0 micro-batches"),
        ((2, 2, 0, 1, 1, 0), "a schedule with forward 0 s"),
        ((2, 2, 1, 1, float("nan"), 0), "a schedule with weight nan s"),
        ((2, 2, 1, 1, 1, -1), "a schedule with send -1 s"),
        ((2, 2, 1, 1, 1, 0, 0.5), "in the memory of 0.5 micro-batches"),
        ((1000, 1000, 1, 1, 1, 0), "a search over 1000 ranks and 1000 micro-batches"),
    ],
)
def test_what_is_no_step(given: tuple[float, ...], message: str) -> None:
    with pytest.raises(UserError, match=message) as found:
        lowband.lists_for_sends(*given)
    assert "\n" not in str(found.value)
