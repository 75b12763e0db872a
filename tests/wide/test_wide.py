"""A sample of the wide cases, and checks that it notices faults. More: `python -m tests.wide`."""

import threading
from collections.abc import Sequence
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import lowband
from tests.wide import trials
from tests.wide.cases import Case
from tests.wide.draw import NETS, RANKS, SCHEMES, case
from tests.wide.observed import Observed, largest
from tests.wide.sharded import run_sharded
from tests.wide.trials import Outcome, tried

LIMIT_S = 120
SAMPLE = [range(first, first + 5) for first in (0, 5, 10, 15)]


@pytest.mark.parametrize("seeds", SAMPLE, ids=lambda seeds: f"{seeds[0]}-{seeds[-1]}")
def test_sample(seeds: Sequence[int]) -> None:
    wrong = {seed: found.wrong for seed in seeds if (found := tried(case(seed), LIMIT_S)).wrong}
    assert not wrong


def test_a_seed_gives_one_case_and_cases_have_everything() -> None:
    drawn = [case(seed) for seed in range(600)]
    assert drawn == [case(seed) for seed in range(600)]
    assert {c.net for c in drawn} == {*NETS}
    assert {c.scheme for c in drawn} == {*SCHEMES}
    assert {c.resumed for c in drawn} == {*SCHEMES, None}
    assert {c.ranks for c in drawn} == {*RANKS}
    for field in fields(Case):
        assert len({getattr(c, field.name) for c in drawn}) > 1, field.name
    assert {c.generation for c in drawn if c.net == "t5"} == {"none", "direct", "inside"}
    assert len({(c.own.side, c.own.summed) for c in drawn if c.own is not None}) == 15


def usual(**changes: Any) -> Case:
    """A small case of two ranks without anything special."""
    drawn = next(c for seed in range(300) if (c := case(seed)).own is not None and c.own.side == "after")
    plain = {
        "checkpointing": "none", "frozen": None, "scheme": "zero3", "ranks": 2, "wrap": "units",
        "levels": (("package", 1), ("node", 2)), "collectives": "hops", "dtype": "fp32", "micro_batches": 2,
        "accumulation": "no_sync", "clip": None, "optimizer": "AdamW", "generation": "none", "average": False,
        "resumed": None, "has_dropout": False,
    }  # fmt: skip
    return replace(drawn, **plain | changes)


@pytest.mark.parametrize(("dtype", "factor"), [("fp32", 1.0001), ("bf16", 1.1)])
def test_a_wrong_sum_is_noticed(monkeypatch: pytest.MonkeyPatch, dtype: str, factor: float) -> None:
    """One rank's gradients are off, of one parameter."""
    hook, hooked_one = nn.Parameter.register_post_accumulate_grad_hook, []

    def hooked(leaf: nn.Parameter, ready: Any) -> object:
        if dist.get_rank() == 1 and leaf.shape == (3, 6) and not hooked_one:  # a gate's
            hooked_one.append(leaf)
            leaf.register_hook(lambda grad: grad * factor)
        return hook(leaf, ready)

    def run(drawn: Case, folder: Path) -> Observed:
        with monkeypatch.context() as patch:
            patch.setattr(nn.Parameter, "register_post_accumulate_grad_hook", hooked)
            return run_sharded(drawn, folder)

    drawn = usual(dtype=dtype)
    assert tried(drawn, LIMIT_S).wrong == ""
    monkeypatch.setattr(trials, "run_sharded", run)
    assert tried(drawn, LIMIT_S).wrong.startswith("wrong: gradient of layers.")


def hangs(drawn: Case, folder: Path) -> Observed:
    if dist.get_rank() == 1:
        threading.Event().wait()
    return run_sharded(drawn, folder)


def raises(drawn: Case, folder: Path) -> Observed:
    raise IndexError("of torch")


def refuses(drawn: Case, folder: Path) -> Observed:
    raise lowband.UserError("not this", allowed="that")


@pytest.mark.parametrize(("run", "limit_s", "outcome", "said"), [
    (hangs, 1.0, "hang", "have not ended"),
    (raises, LIMIT_S, "unclear", "IndexError: of torch"),
    (refuses, LIMIT_S, "refused", "UserError: not this (allowed: that)"),
])  # fmt: skip
def test_what_becomes_of_a_case(
    monkeypatch: pytest.MonkeyPatch, run: Any, limit_s: float, outcome: str, said: str
) -> None:
    monkeypatch.setattr(trials, "run_sharded", run)
    found = tried(usual(), limit_s)
    assert found.outcome == outcome
    assert said in found.said
    assert found.wrong.startswith(outcome)


def test_only_a_case_that_may_be_refused_is_well_if_it_is() -> None:
    def wrong(drawn: Case, said: str) -> str:
        return Outcome(drawn, "refused", None, said, 0.0).wrong

    t5 = replace(usual(), net="t5", own=None, generation="direct")
    said = "UserError: shared.weight: embedding of a shard covers this rank's part only (allowed: ...)"
    assert wrong(t5, said) == ""
    assert wrong(replace(t5, generation="inside"), said)
    assert wrong(t5, "UserError: breadth-first: no chain")
    assert wrong(replace(t5, accumulation="breadth"), "UserError: breadth-first: no chain") == ""
    assert Outcome(t5, "right", 0.0, "", 0.0).wrong == ""  # once T5's generate is right
    assert Outcome(t5, "unclear", None, said, 0.0).wrong


def test_everything_observed_is_compared() -> None:
    def observed(**changed: Any) -> Observed:
        seen = {
            "losses": [torch.ones(())], "gradients": [{"w": 1.0, "v": 0.0}], "clipped": [1.0],
            "tokens": [torch.ones(2)], "states": [{"w": torch.ones(2)}],
        }  # fmt: skip
        return Observed(**{**seen, **changed})

    def apart(**changed: Any) -> float:
        return largest([observed(**changed), observed()], [observed(), observed()])[0]

    assert {*asdict(observed())} == {field.name for field in fields(Observed)}
    assert apart() == 0
    assert apart(losses=[torch.tensor(1.5)]) == pytest.approx(0.5)
    assert apart(losses=[torch.tensor(float("nan"))]) == float("inf")
    assert apart(losses=[]) == float("inf")
    assert apart(gradients=[{"w": 1.25, "v": 0.0}]) == pytest.approx(0.25)
    assert apart(gradients=[{"w": 1.0, "v": 1e-3}]) == pytest.approx(0.1)  # of a hundredth of the whole
    assert apart(gradients=[{"w": 1.0}]) == float("inf")
    assert apart(clipped=[1.125]) == pytest.approx(0.125)
    assert apart(tokens=[torch.zeros(2)]) == float("inf")
    assert apart(states=[{"w": torch.tensor([1.0, 1.5])}]) == pytest.approx(0.5)
    assert apart(states=[{"v": torch.ones(2)}]) == float("inf")
    assert apart(states=[{"w": torch.ones(3)}]) == float("inf")
