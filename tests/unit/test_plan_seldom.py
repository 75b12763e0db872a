"""`lowband plan --outer-gbps`: the bound, the rule of choice, and how the wait depends on period and rate."""

import pytest

from lowband.__main__ import main
from lowband.errors import UserError
from lowband.predict.request import setting
from lowband.predict.search.candidates import MODEL_ERROR
from lowband.predict.search.plan_seldom import WIRES, Choice, chosen, plan, possible, with_outer_rate
from lowband.predict.workload import Workload
from lowband.spec.mesh import WORLD
from tests.checkout import CONFIG

RANKS, NODE = 32, 8


def found(gigabits: float = 1.0, most_stale: int = 100, exact: bool = False) -> list[Choice]:
    machine, stack = setting(CONFIG, "dgx-a100-40gb", None)
    machine = with_outer_rate(machine, gigabits)
    inside = possible([CONFIG.scheme("diloco")], machine, RANKS)
    job = Workload(machine, stack, CONFIG.given_model("llama-7b"), inside[0], RANKS, 1, 2048)
    return plan(job, inside, most_stale, [(1, 4)], ["full"], exact)


def waits(choices: list[Choice], every: int) -> float:
    """Seconds of a step that wait for replicas, native and without delay."""
    [choice] = [c for c in choices if (c.row()["every"], c.wire, c.row()["delay"]) == (every, "native", 0)]
    return (1 - choice.computing) * choice.step_s


def test_the_link_is_shared_by_the_ranks_of_a_node() -> None:
    machine, _ = setting(CONFIG, "dgx-a100-40gb", None)
    assert with_outer_rate(machine, 80).link(WORLD).gigabytes_per_s == pytest.approx(80 / 8 / NODE)


def test_the_wait_falls_with_the_period_and_the_rate() -> None:
    slow, fast = found(1), found(2)
    assert waits(slow, 20) == pytest.approx(waits(slow, 10) / 2)
    assert waits(fast, 10) == pytest.approx(waits(slow, 10) / 2, rel=1e-3)  # but for the latency


def test_bounds_hold_and_the_fastest_comes_first() -> None:
    choices = found(most_stale=20)
    assert max(choice.staleness for choice in choices) == 20
    assert [c.step_s for c in choices] == sorted(c.step_s for c in choices)
    assert {choice.wire for choice in choices} == set(WIRES)
    assert {choice.wire for choice in found(exact=True)} == {"native"}


def test_staleness_is_the_period_and_the_delay() -> None:
    rows = [choice.row() for choice in found(most_stale=21)]
    assert all(row["staleness"] == row["every"] + row["delay"] for row in rows)
    assert any(row["delay"] for row in rows)


def test_what_is_chosen_is_nearly_as_fast_and_nothing_so_fast_is_less_lossy_or_stale() -> None:
    for gigabits in (0.1, 1, 10, 1e6):
        choices = found(gigabits)
        best = chosen(choices)
        near = [c for c in choices if c.step_s <= (1 + MODEL_ERROR) * choices[0].step_s]
        assert best in near
        key = (WIRES.index(best.wire), best.staleness)
        assert all((WIRES.index(c.wire), c.staleness) >= key for c in near)
    assert (best.wire, best.staleness) == ("native", 1)  # a fast link: every step, exactly


def test_a_scheme_with_sync_is_placed_on_other_level_names() -> None:
    placed = CONFIG.scheme("diloco").on(["board", "rack"])
    assert placed.sync is not None
    assert (placed.optim, placed.sync.beyond) == ("rack", "rack")


def test_one_node_has_no_replicas() -> None:
    machine, _ = setting(CONFIG, "dgx-a100-40gb", None)
    with pytest.raises(UserError, match="8 ranks are in one node"):
        possible([CONFIG.scheme("diloco")], machine, 8)


@pytest.mark.parametrize(
    ("more", "says"),
    [
        (["--outer-gbps", "0"], "argument --outer-gbps: '0' (allowed: a number above 0, 1e-09 to 1e+15)"),
        (["--outer-gbps", "1", "--write", "mine"], "--outer-gbps is without --write"),
        (["--outer-gbps", "1", "--micro-batch", "3"], "no micro-batch divides 128 sequences over 32 ranks"),
    ],
)
def test_bad_input_is_one_line(more: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["plan", "--cluster", "dgx-a100-40gb", "--model", "llama-7b", "--gpus", str(RANKS), *more]
    try:
        code = main(command)
    except SystemExit as ended:
        code = ended.code
    assert code == 2
    assert says in capsys.readouterr().err.splitlines()[-1]


def test_the_command_prints_the_choice(capsys: pytest.CaptureFixture[str]) -> None:
    assert not main(
        ["plan", "--cluster", "frontier", "--model", "gpt-20b", "--gpus", "64", "--outer-gbps", "10"]
    )
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("predicted, with 10 Gbit/s between nodes")
    assert len(lines[2].split()) == len(lines[1].replace(" (s)", "").split())


def test_where_nothing_fits_the_least_that_was_tried_is_named() -> None:
    machine, stack = setting(CONFIG, "dgx-a100-40gb", None)
    small = machine.model_copy(update={"device": machine.device.model_copy(update={"memory_gib": 1.0})})
    inside = possible([CONFIG.scheme("diloco")], small, RANKS)
    job = Workload(small, stack, CONFIG.given_model("llama-7b"), inside[0], RANKS, 1, 2048)

    def least(*batches: tuple[int, int]) -> str:
        with pytest.raises(UserError, match="no choice fits the memory: the least takes") as refused:
            plan(job, inside, 100, [*batches], ["full"], exact=True)
        return str(refused.value)

    assert least((1, 1)) != least((8, 1))
    assert least((1, 1), (8, 1)) == least((1, 1))
