"""A sample of the random cases, and checks that it notices faults. More: `python -m tests.random`."""

import faulthandler
import threading
from typing import Any

import pytest
import torch
from torch import nn

from lowband.spec.axes import Axes
from tests.random import groups
from tests.random.cases import Case
from tests.random.draw import FEATURES, case
from tests.random.groups import Outcome, outcomes
from tests.random.observed import Observed, differences
from tests.random.sharded import run_sharded

LIMIT_S = 120  # of a case
COUNTS = ((1, 8), (2, 16), (3, 8), (4, 8), (6, 2), (8, 2))  # ranks and cases: large groups cost most


def sample() -> list[Case]:
    """The first cases of each number of ranks."""
    drawn = [case(seed) for seed in range(300)]
    return [c for ranks, count in COUNTS for c in [c for c in drawn if c.ranks == ranks][:count]]


def few() -> list[Case]:
    """Of the sample, cases with every number of ranks and every feature."""
    cases, kept = sample(), []
    missing = set().union(*map(shows, cases))
    while missing:
        kept.append(max(cases, key=lambda c: len(missing & shows(c))))
        missing -= shows(kept[-1])
    return kept


def shows(drawn: Case) -> set[Any]:
    return {drawn.ranks, *drawn.features}


@pytest.fixture(scope="module", params=[few, pytest.param(sample, marks=pytest.mark.wide)])
def alone(request: pytest.FixtureRequest) -> list[Outcome]:
    return list(outcomes(request.param(), LIMIT_S))


def test_sample(alone: list[Outcome]) -> None:
    assert not {f"seed {each.case.seed}": each.wrong for each in alone if each.wrong}
    assert len({each.exact for each in alone}) == len(alone)


AXES = (Axes(tensor=2), Axes(pipeline=2))


@pytest.mark.parametrize(
    ("axes", "first", "every"),
    [
        *((axes, 3 * i, 6) for i, axes in enumerate(AXES)),
        *(pytest.param(axes, 0, 1, marks=pytest.mark.wide) for axes in AXES),
    ],
    ids=str,
)
def test_idle_axes_change_no_bit(alone: list[Outcome], axes: Axes, first: int, every: int) -> None:
    """Those of 2 to 4 ranks: every sixth, three apart, or all."""
    of_few = [each for each in alone if each.case.ranks in (2, 3, 4)][first::every]
    beside = outcomes([each.case for each in of_few], LIMIT_S, axes)
    assert {each.case.seed: (each.wrong, each.exact) for each in beside} == {
        each.case.seed: (each.wrong, each.exact) for each in of_few
    }


def test_a_seed_gives_one_case_and_cases_have_all_features() -> None:
    drawn = [case(seed) for seed in range(200)]
    assert drawn == [case(seed) for seed in range(200)]
    assert len(set(drawn)) == 200
    assert {feature for c in drawn for feature in c.features} == {*FEATURES, "flat", "joined"}
    assert not {f for seed in range(100) for f in case(seed, frozenset({"two"})).features} & {"two"}


def two_ranks(count: int) -> list[Case]:
    """Plain cases that round nothing away."""
    drawn = (case(seed, frozenset({"wires", "bf16", "bf16-sums", "flat"})) for seed in range(300))
    return [c for c in drawn if c.ranks == 2 and c.is_plain][:count]


def test_a_hang_is_a_failed_case(monkeypatch: pytest.MonkeyPatch) -> None:
    """And the cases after it still run. It is at its limit as soon as it hangs."""
    first, second, third = two_ranks(3)
    later, how = faulthandler.dump_traceback_later, {}

    def limit(limit_s: float, **options: Any) -> None:
        assert limit_s == LIMIT_S
        how.update(options)
        later(limit_s, **options)

    def hang(drawn: Case, axes: Axes) -> Observed:
        if drawn == second:
            later(0.1, **how)
            threading.Event().wait()
        return run_sharded(drawn, axes)

    monkeypatch.setattr(faulthandler, "dump_traceback_later", limit)
    monkeypatch.setattr(groups, "run_sharded", hang)
    wrong = {found.case.seed: found.wrong for found in outcomes([first, second, third], LIMIT_S)}
    assert "hung" in wrong.pop(second.seed)
    assert wrong == {first.seed: "", third.seed: ""}


def test_a_wrong_sum_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """One rank's gradients are off by a millionth."""
    [drawn] = two_ranks(1)

    def run(drawn: Case, axes: Axes) -> Observed:
        with monkeypatch.context() as patch:
            patch.setattr(nn.Parameter, "register_post_accumulate_grad_hook", hooked)
            return run_sharded(drawn, axes)

    hook = nn.Parameter.register_post_accumulate_grad_hook

    def hooked(leaf: nn.Parameter, ready) -> object:
        if torch.distributed.get_rank() == 1:
            leaf.register_hook(lambda grad: grad * 1.000001)
        return hook(leaf, ready)

    monkeypatch.setattr(groups, "run_sharded", run)
    [found] = outcomes([drawn], LIMIT_S)
    assert "off by" in found.wrong


def test_everything_observed_is_compared() -> None:
    [drawn] = two_ranks(1)

    def observed() -> Observed:
        return Observed(
            losses=[torch.ones(())], norms=[1.0], broken=[True], states=[{"w": torch.ones(2)}], units=[[512]]
        )

    def wrong(**changed: object) -> list[str]:
        seen = observed()
        for name, value in changed.items():
            setattr(seen, name, value)
        return differences(drawn, [seen, observed()], [observed(), observed()])[0]

    assert wrong() == []
    assert wrong(losses=[torch.ones(()) * 2])
    assert wrong(norms=[1.1])
    assert wrong(broken=[False])
    assert wrong(refused=[True])
    assert wrong(states=[{"w": torch.tensor([1.0, 1.1])}])
    assert wrong(states=[{"v": torch.ones(2)}])
    assert wrong(held=[{"gathered": 4}])
    assert wrong(sent=[[{}]])
