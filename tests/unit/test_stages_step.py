"""What messages between stages add to a step where they travel beside the computation."""

from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lowband.cost.stages_step import step_s
from lowband.cost.timeline import timeline
from lowband.evidence.validation.scale_model import box_step_s
from lowband.spec.csv_tables import read_table
from lowband.spec.schedules import SCHEDULES, lists
from tests.checkout import CONFIG, REFERENCE


def played(
    name: str, ranks: int, many: int, of_stage: list[tuple[float, float, float]], send_s: list[float]
) -> float:
    """Every action as early as it can be, written for itself: rank by rank, over and over."""
    last = len(of_stage) - 1
    left = [list(of_rank) for of_rank in lists(name, ranks, many, len(of_stage) // ranks)]
    rank_of = {action.stage: rank for rank, of_rank in enumerate(left) for action in of_rank}
    free, leaves = [0.0] * ranks, [0.0] * ranks
    there: dict[tuple[str, int, int], float] = {}  # when the rank that takes a result has it
    while any(left):
        for rank, actions in enumerate(left):
            while actions:
                kind, stage, i = actions[0]
                needs = {"forward": [("F", stage - 1, i)] if stage else [], "weight": []}.get(
                    kind, [("I", stage + 1, i)] if stage < last else []
                )
                if any(need not in there for need in needs):
                    break
                forward, input_, weight = of_stage[stage]
                takes = {"forward": forward, "input": input_, "weight": weight}.get(kind, input_ + weight)
                free[rank] = max([free[rank], *(there[need] for need in needs)]) + takes
                actions.pop(0)
                to = stage + 1 if kind == "forward" else stage - 1
                if kind == "weight" or not 0 <= to <= last:
                    continue
                key = "F" if kind == "forward" else "I", stage, i
                there[key] = free[rank]
                if rank_of[to] != rank:
                    leaves[rank] = max(leaves[rank], free[rank]) + send_s[min(stage, to)]
                    there[key] = leaves[rank]
    return max(free)


@settings(max_examples=80, deadline=None)
@given(st.sampled_from(sorted(SCHEDULES)), st.integers(1, 4), st.integers(1, 9), st.randoms())
def test_a_step_is_that_of_its_lists(name: str, ranks: int, many: int, random: Random) -> None:
    """With links, and stages, of any speed: messages longer than the computation wait for each other."""
    row = SCHEDULES[name]
    ranks = 1 if row.ranks == 1 else ranks
    stages = ranks * random.randint(row.chunks[0], row.chunks[1] or 3)
    of_stage = [tuple(random.uniform(0.2, 2) for _ in range(3)) for _ in range(stages)]
    send_s = [random.choice([0.0, 0.1, 1.0, 5.0]) for _ in range(stages - 1)]
    found = step_s(name, ranks, many, tuple(of_stage), tuple(send_s))  # type: ignore[arg-type]
    assert found == pytest.approx(played(name, ranks, many, of_stage, send_s))  # type: ignore[arg-type]
    line = timeline(lists(name, ranks, many, stages // ranks), *zip(*of_stage, strict=True))  # type: ignore[arg-type]
    without = step_s(name, ranks, many, tuple(of_stage))  # type: ignore[arg-type]
    assert without == pytest.approx(line.step_s)
    assert found >= without * (1 - 1e-12)


@pytest.mark.parametrize("name", ["1f1b", "interleaved", "breadth", "zb-h2", "dualpipe-v"])
@pytest.mark.parametrize("send_s", [0.1, 0.6, 2.0])
def test_long_steps_go_on_as_they_began(name: str, send_s: float) -> None:
    chunks = max(SCHEDULES[name].chunks[0], 2 if name == "breadth" else 1)
    of_stage = ((0.5, 0.6, 0.4),) * (3 * chunks)
    sends = (send_s,) * (3 * chunks - 1)
    whole = played(name, 3, 33, list(of_stage), list(sends))
    assert step_s(name, 3, 33, of_stage, sends) == pytest.approx(whole, rel=0.02)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "of_stage", [((8.1, 11.7, 0.1), (7.2, 10.7, 0.4)), ((1.0, 1.0, 1.0), (1.1, 1.1, 1.0))]
)
@pytest.mark.parametrize("sends", [(), (0.2,)])
def test_no_step_is_shorter_than_its_slowest_rank_computes(
    of_stage: tuple[tuple[float, float, float], ...], sends: tuple[float, ...]
) -> None:
    """Although another one sets the pace for as long as there are forwards ahead of it."""
    found = step_s("zb-h2", 2, 64, of_stage, sends)
    assert found >= 64 * max(map(sum, of_stage))
    assert found == pytest.approx(played("zb-h2", 2, 64, [*of_stage], [*sends] or [0.0]), rel=0.01)


def test_long_steps_are_near_where_rounds_alternate() -> None:
    """Messages that wait for each other: of drawn pipelines most are near."""
    random, off = Random(7), list[float]()
    for _ in range(60):
        name, ranks = random.choice(["1f1b", "zb-h1", "interleaved", "breadth"]), random.randint(2, 4)
        stages = ranks * (1 if SCHEDULES[name].chunks[1] else 2)
        of_stage = tuple((random.uniform(0.5, 2), random.uniform(0.5, 2), 0.5) for _ in range(stages))
        send_s = tuple(random.choice([0.1, 0.3, 1.0]) for _ in range(stages - 1))
        found = step_s(name, ranks, 48, of_stage, send_s)  # type: ignore[arg-type]
        off.append(abs(found / played(name, ranks, 48, [*of_stage], [*send_s]) - 1))
    assert sorted(off)[-3] < 0.01
    assert max(off) < 0.03


@pytest.mark.parametrize("ranks", [2, 3, 5])
def test_a_trip_in_1f1b_waits_for_its_messages(ranks: int) -> None:
    """By hand: p micro-batches come back to the first rank after p passes and 2 (p - 1) messages; where
    stages take turns, only the way in and out waits."""
    pass_s, sent = 1.5, 0.25
    steps = [
        step_s("1f1b", ranks, many * ranks, ((0.5, 0.6, 0.4),) * ranks, (sent,) * (ranks - 1))
        for many in (3, 4)
    ]
    assert steps[1] - steps[0] == pytest.approx(ranks * pass_s + 2 * (ranks - 1) * sent)
    of_stage, sends = ((0.5, 0.6, 0.4),) * 3 * ranks, (sent,) * (3 * ranks - 1)
    steps = [step_s("interleaved", ranks, many * ranks, of_stage, sends) for many in (3, 4)]
    assert steps[1] - steps[0] == pytest.approx(3 * ranks * pass_s)


def test_stages_in_a_box_take_as_long_as_predicted() -> None:
    """The five cells of suite box-axes: with sends added to the step they took 17 to 31 % less than that."""
    shipped = read_table(REFERENCE / "box-axes" / "runs.csv").set_index("run_id")
    found = {spec.run_id: box_step_s(spec) for spec in CONFIG.runs(["box-axes"])}
    assert set(found) == set(shipped.index)
    for run_id, step_time_s in shipped["step_time_s"].items():
        assert step_time_s == pytest.approx(found[run_id], rel=0.1), run_id
