"""A sample of the campaign, and that it notices what is wrong. The whole one is `make faults`."""

import json

import pytest

from tests.faults.draw import STEPS, Case, case
from tests.faults.kinds import KINDS, Seen, kill_rank
from tests.faults.running import Running
from tests.faults.trial import trial


@pytest.mark.parametrize(
    ("kind", "seed"),
    [
        # Of one scheme on 4 ranks, so that one undisturbed run is enough.
        ("kill rank", 4),
        ("flip a bit of checkpoint", 22),
        pytest.param("kill rank", 3, marks=pytest.mark.wide),
        pytest.param("flip a bit of checkpoint", 5, marks=pytest.mark.wide),
        pytest.param("run twice", 8, marks=pytest.mark.wide),
    ],
)
def test_a_fault_is_told_and_costs_nothing(kind: str, seed: int) -> None:
    result = trial(case(seed, [kind]))
    assert result.wrong == ""
    assert (result.same_weights, result.same_steps) == (True, True)


def another_loss(run: Running) -> Seen:
    """A fault that nobody notices: a recorded loss is another one when the run goes on."""
    seen = kill_rank(run)
    lines = run.folder.steps.read_text().splitlines(keepends=True)
    first = json.loads(lines[0])
    lines[0] = json.dumps(first | {"loss": first["loss"] + 1}) + "\n"
    run.folder.steps.write_text("".join(lines))
    return seen


def test_wrong_results_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(KINDS, "another loss", another_loss)
    result = trial(Case(0, "another loss", "zero3", 4, 20, 0.0, 1))
    assert (result.same_weights, result.same_steps) == (True, False)
    assert result.wrong == "other results than undisturbed"


def test_kinds_take_turns_and_moments_are_within_the_run() -> None:
    cases = [case(seed, list(KINDS)) for seed in range(200)]
    assert {each.kind for each in cases} == set(KINDS)
    assert all(0 <= each.step < STEPS and 0 <= each.victim < each.ranks for each in cases)
    assert len({(each.kind, each.step, each.victim, each.scheme) for each in cases}) > 190
