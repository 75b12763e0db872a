"""Lists of actions: what `check` refuses, and what every named schedule's lists have in common."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lowband.errors import UserError
from lowband.spec.axes import SCHEDULE_OF, row_of
from lowband.spec.schedule import Action, check, count, peak
from lowband.spec.schedules import SCHEDULES, Name, lists


def actions(text: str) -> list[Action]:
    """'F0.1' is the forward of stage 0 for micro-batch 1; B: whole backward, I: input, W: weight."""
    kinds = {"F": "forward", "B": "backward", "I": "input", "W": "weight"}
    return [Action(kinds[word[0]], *map(int, word[1:].split("."))) for word in text.split()]


def written(of_rank: list[Action]) -> str:
    return " ".join(f"{action.kind[0].upper()}{action.stage}.{action.micro_batch}" for action in of_rank)


def test_one_rank_accumulates_in_two_orders() -> None:
    """Depth: one micro-batch after the other; breadth: as engine/passes/breadth.py, unit by unit."""
    (depth,) = lists("depth", 1, 2, 2)
    assert written(depth) == "F0.0 F1.0 B1.0 B0.0 F0.1 F1.1 B1.1 B0.1"
    (breadth,) = lists("breadth", 1, 2, 2)
    assert written(breadth) == "F0.0 F0.1 F1.0 F1.1 B1.0 B1.1 B0.0 B0.1"
    assert peak([depth]) == [2] and peak([breadth]) == [4]


@pytest.mark.parametrize("name", [name for name in SCHEDULES if name != "depth"])
def test_a_row_is_found_by_its_option_again(name: Name) -> None:
    """With the least chunks that it takes; depth is 1f1b on one stage."""
    ranks, chunks = 4, SCHEDULES[name].chunks[0]
    found = row_of(SCHEDULE_OF[name], chunks)
    assert lists(found, ranks, 6, chunks) == lists(name, ranks, 6, chunks)


def test_zb_h1_by_hand() -> None:
    """Three ranks, four micro-batches; the shape is that of figure 3 of arXiv 2401.10241."""
    assert [written(of_rank) for of_rank in lists("zb-h1", 3, 4, 1)] == [
        "F0.0 F0.1 F0.2 I0.0 W0.0 F0.3 I0.1 W0.1 I0.2 W0.2 I0.3 W0.3",
        "F1.0 F1.1 I1.0 F1.2 I1.1 W1.0 F1.3 I1.2 W1.1 I1.3 W1.2 W1.3",
        "F2.0 I2.0 F2.1 I2.1 F2.2 I2.2 W2.0 F2.3 I2.3 W2.1 W2.2 W2.3",
    ]


@st.composite
def settings_of(draw) -> tuple[str, int, int, int]:
    name = draw(st.sampled_from(list(SCHEDULES)))
    row = SCHEDULES[name]
    least, most = row.chunks
    ranks = draw(st.integers(1, row.ranks or 9))
    return name, ranks, draw(st.integers(1, 20)), draw(st.integers(least, most or 4))


@settings(max_examples=400, deadline=None)
@given(settings_of())
def test_every_row_writes_lists_that_run(setting: tuple[str, int, int, int]) -> None:
    name, ranks, micro_batches, chunks = setting
    row, found = SCHEDULES[name], lists(*setting)
    check(found)
    assert len(found) == ranks
    assert count(found, "forward") == [chunks * micro_batches] * ranks
    assert count(found, "input") == count(found, "weight")
    halves, whole = count(found, "input"), count(found, "backward")
    assert [h + b for h, b in zip(halves, whole, strict=True)] == [chunks * micro_batches] * ranks
    assert any(halves) == row.splits or micro_batches < 2 * ranks
    for rank, of_rank in enumerate(found):
        stages = {rank, 2 * ranks - 1 - rank} if row.in_a_vee else set(range(rank, ranks * chunks, ranks))
        assert {action.stage for action in of_rank} == stages
    assert max(peak(found)) <= chunks * micro_batches


@pytest.mark.parametrize("ranks", range(1, 9))
@pytest.mark.parametrize("rounds", [1, 2, 4])
def test_peaks_are_those_of_the_papers(ranks: int, rounds: int) -> None:
    """In activations of one micro-batch in one stage, on a step of `rounds` micro-batches per rank."""
    many = rounds * ranks
    assert peak(lists("gpipe", ranks, many, 1)) == [many] * ranks
    assert peak(lists("breadth", ranks, many, 3)) == [3 * many] * ranks
    # 2104.04473, section 2.2.1: at most p micro-batches; rank r has p - r
    assert peak(lists("1f1b", ranks, many, 1)) == [ranks - rank for rank in range(ranks)]
    # 2205.05198, section 4.2.3: 1 + (p - 1) / (p v) as much as 1F1B, on the first rank
    interleaved = min(3 * many, 3 * ranks + ranks - 1)
    assert peak(lists("interleaved", ranks, many, 3))[0] == interleaved
    # 2401.10241: ZB-H1 p M_B on every rank, ZB-H2 (2 p - 1) M_B; section 6: ZB-V as 1F1B, in half stages
    assert peak(lists("zb-h1", ranks, many, 1)) == [ranks] * ranks
    assert peak(lists("zb-h2", ranks, many, 1)) == [min(many, 2 * ranks - 1)] * ranks
    if rounds > 1:
        assert peak(lists("zb-v", ranks, many, 2)) == [2 * ranks] * ranks
        # 2412.19437, table 2: DualPipe needs PP + 1 on PP ranks, so this half of it 2 p + 1 half stages
        assert peak(lists("dualpipe-v", ranks, many, 2)) == [2 * ranks + 1] * ranks


@pytest.mark.parametrize(
    ("ranks", "message"),
    [
        (["F0.0 B0.0 F0.0"], "computes the forward of stage 0, micro-batch 0, 2 times"),
        (["F0.0"], "computes the input of stage 0, micro-batch 0, 0 times"),
        (["F0.0 I0.0"], "computes the weight of stage 0, micro-batch 0, 0 times"),
        (["F0.0 B0.0 W0.0"], "computes the weight of stage 0, micro-batch 0, 2 times"),
        (["F0.0 B0.0 F0.2 B0.2"], "computes the forward of stage 0, micro-batch 1, 0 times"),
        (["F0.0 B0.0", "F0.1 B0.1"], "stage 0 of a schedule lies on ranks 0 and 1"),
        ([], "a schedule without actions"),
        ([""], "a schedule without actions"),
        (["B0.0 F0.0"], "rank 0, before its backward of stage 0, micro-batch 0, for the forward of stage 0"),
        (["F0.0 W0.0 I0.0"], "before its weight of stage 0, micro-batch 0, for the input of stage 0"),
    ],
)
def test_what_is_no_step(ranks: list[str], message: str) -> None:
    with pytest.raises(UserError, match=message) as found:
        check([actions(of_rank) for of_rank in ranks])
    assert "\n" not in str(found.value)


def test_a_deadlock_is_found() -> None:
    """Each list by itself is in order, but each rank waits for what the other one computes later."""
    good = ["F0.0 F0.1 B0.1 B0.0", "F1.0 F1.1 B1.1 B1.0"]
    check([actions(of_rank) for of_rank in good])
    with pytest.raises(UserError) as found:
        check([actions("F0.0 B0.0 F0.1 B0.1"), actions("F1.0 F1.1 B1.0 B1.1")])
    assert str(found.value).startswith(
        "the ranks of a schedule wait for each other: rank 0, before its backward of stage 0, micro-batch 0, "
        "for the input of stage 1, micro-batch 0; rank 1, before its forward of stage 1, micro-batch 1, for "
        "the forward of stage 0, micro-batch 1"
    )


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        (("2f2b", 2, 2, 1), "unknown schedule '2f2b'"),
        (("depth", 2, 2, 1), "'depth' with 2 ranks .allowed: 1 ranks"),
        (("1f1b", 0, 2, 1), "'1f1b' with 0 ranks .allowed: 1 or more ranks"),
        (("1f1b", 2, 0, 1), "'1f1b' with 0 micro-batches"),
        (("interleaved", 2, 2, 1), "'interleaved' with 1 chunks .allowed: 2 or more chunks"),
        (("zb-v", 2, 2, 3), "'zb-v' with 3 chunks .allowed: 2 chunks"),
    ],
)
def test_what_a_row_does_not_take(setting: tuple[str, int, int, int], message: str) -> None:
    with pytest.raises(UserError, match=message):
        lists(*setting)
