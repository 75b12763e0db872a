"""Faults of layers of experts that others have had in public, in a model of a user's own.

A case is trained for two steps, on ranks and in one process that has all of their tokens. Its losses are sums
over tokens divided by the number of all of them, so a rank may have any number of tokens, also none.
"""

from functools import cache
from typing import Any, NamedTuple

import pytest
import torch
from near import assert_near
from own_experts import BIAS, EXPERTS, ONE, H, Layer, model_of

import lowband
from lowband.run.on_ranks import on_ranks

CLIP = 1e-3
LOSS = lowband.Routing(EXPERTS, 2, balance="loss", loss_weight=0.5)


class Case(NamedTuple):
    """tokens: of each rank; spread: whether the user has not forgotten spread_experts"""

    tokens: tuple[int, ...]
    expert: int
    route: Any = "merged"
    scheme: str = "zero3"
    routing: lowband.Routing = BIAS
    spread: bool = True
    inner: tuple[tuple[str, int], ...] = ()
    copies: int = 0

    @property
    def axes(self) -> lowband.Axes:
        return lowband.Axes(expert=self.expert, route=self.route, copies=self.copies)


def inputs(case: Case, step: int) -> torch.Tensor:
    random = torch.Generator().manual_seed(10 + step)
    return torch.randn(sum(case.tokens), H, generator=random)


class Found(NamedTuple):
    """
    loss:    of all tokens
    norms:   before clipping
    after:   what of each parameter the first step, with rate 1, took away
    clipped: 2-norm of what the second one, whose gradient was clipped, took away of all parameters
    loads:   by router, of each step
    none:    parameters without a gradient
    state:   at the end
    """

    loss: float
    norms: list[float]
    after: dict[str, torch.Tensor]
    clipped: float
    loads: list[dict[str, torch.Tensor]]
    none: list[str]
    state: dict[str, torch.Tensor]


def trained(case: Case, place: int | None) -> Found:
    """place: None: all tokens, in one process"""
    model = model_of(case.routing)
    if place is not None:
        topology = lowband.Topology(dict(case.inner), case.axes)
        if case.spread:
            lowband.spread_experts(model, topology)
        lowband.shard(model, case.scheme, topology, Layer, compute_dtype=torch.float32)

    def state() -> dict[str, torch.Tensor]:
        whole = model.state_dict() if place is None else lowband.full_state_dict(model)
        return {name: value.clone() for name, value in whole.items()}

    before, changes, norms, loads, losses = state(), [], [], [], []
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    none: list[str] = []
    for step in range(2):
        x = inputs(case, step)
        if place is not None:
            x = x.split(case.tokens)[place]
        with torch.no_grad():
            model(x)  # an evaluation
        optimizer.zero_grad()
        loss = model(x).logsumexp(-1).sum() / sum(case.tokens) * (1 if place is None else len(case.tokens))
        loss.backward()
        losses.append(loss.item())
        none += [name for name, p in model.named_parameters() if p.grad is None]
        most = CLIP if step else 1e6
        whole = torch.nn.utils.clip_grad_norm_(model.parameters(), most) if place is None else None
        norms.append(float(lowband.clip_grad_norm_(model, most) if whole is None else whole))
        optimizer.step()
        loads.append(lowband.balance_experts(model))
        now = state()
        names = [name for name, _ in model.named_parameters()] if now else []
        changes.append({name: before[name] - now[name] for name in names})
        before = now
    clipped = sum(float(change.double().square().sum()) for change in changes[1].values()) ** 0.5
    return Found(sum(losses), norms, changes[0], clipped, loads, none, before)


def on_rank(case: Case) -> Found:
    return trained(case, torch.distributed.get_rank())


@cache
def both(case: Case) -> tuple[list[Found], Found]:
    """Of each rank, and of one process."""
    return on_ranks(len(case.tokens), on_rank, case), on_ranks(1, trained, case, None)[0]


NODES = (("node", 2),)
CASES = [
    Case((6, 6), 2, "flat"),
    Case((9, 2), 2, scheme="zero1", routing=ONE),
    Case((0, 7), 2, "hops", routing=ONE),
    Case((1, 0), 2, routing=ONE),
    Case((5, 4), 2, spread=False),
    Case((3, 0, 8, 1), 4, inner=NODES, scheme="hsdp"),
    Case((5, 0, 2, 7), 2, "hops", inner=NODES),
    Case((4, 7, 0, 5), 4, "hops", inner=NODES, routing=ONE, copies=2),
]
WIDE = [
    Case((0, 0, 0, 1), 4, "flat", routing=ONE),
    Case((4, 4, 4, 4), 2, "flat", scheme="ddp"),
    Case((2, 9, 1, 0), 2, spread=False, inner=NODES),
]
of_cases = pytest.mark.parametrize(
    "case",
    [*CASES, *(pytest.param(case, marks=pytest.mark.wide) for case in WIDE)],
    ids=lambda case: (
        f"{case.tokens}-expert{case.expert}-{case.route}-{'spread' if case.spread else 'forgotten'}"
    ),
)


@of_cases
def test_gradients_are_those_of_one_process(case: Case) -> None:
    """Not doubled on experts (pytorch #160285), none lost (NeMo PR 1260), and the router's, which a right
    loss does not show (transformers #48687). Where spread_experts was forgotten, ranks have all experts."""
    found, expected = both(case)
    ranks = len(case.tokens)
    assert sum(one.loss for one in found) / ranks == pytest.approx(expected.loss, rel=1e-5)
    assert_near(found[0].after, expected.after, rtol=2e-4, atol=2e-6)
    assert_near(found[0].state, expected.state, rtol=2e-4, atol=2e-5)


@of_cases
def test_norms_count_every_expert_once(case: Case) -> None:
    """Megatron-LM #5916: those of other ranks were left out, and clipping clipped less."""
    found, expected = both(case)
    assert [one.norms for one in found] == [pytest.approx(expected.norms, rel=1e-5)] * len(found)
    assert found[0].clipped == pytest.approx(CLIP, rel=1e-3)


@of_cases
def test_loads_count_every_token_once(case: Case) -> None:
    """Neither twice where the forward is repeated (torchtitan PR 1593), nor in an evaluation (prime-rl PR
    2953)."""
    found, expected = both(case)
    for one in found:
        for mine, theirs in zip(one.loads, expected.loads, strict=True):
            assert {name: load.tolist() for name, load in mine.items()} == {
                name: load.tolist() for name, load in theirs.items()
            }
    assert sum(int(load.sum()) for load in expected.loads[0].values()) == 2 * case.routing.top_k * sum(
        case.tokens
    )


@of_cases
def test_experts_that_no_token_chooses_have_zeros_for_gradients(case: Case) -> None:
    """Not None, on any rank: an optimizer would leave out what others step."""
    found, expected = both(case)
    assert [one.none for one in found] == [[]] * len(found)
    if sum(case.tokens) == 1:
        chosen = expected.loads[0]["1.mixture.router"].bool()
        change = found[0].after["1.mixture.experts.up"]
        assert not change[~chosen].any() and change[chosen].any()


# ---- others


def _auxiliary(expert: int) -> dict[str, torch.Tensor]:
    """Without a loss but the auxiliary one: what a step with rate 1 takes away of the routers."""
    model = model_of(LOSS)
    for each in model.modules():
        if isinstance(each, lowband.MixtureOfExperts):
            each.router.counts_of_all, each.router.tokens_of_all = _summed, lambda own: own
    topology = lowband.Topology({}, lowband.Axes(expert=expert))
    lowband.shard(lowband.spread_experts(model, topology), "zero2", topology, Layer, torch.float32)
    before = lowband.full_state_dict(model)
    (model(_tokens().chunk(2)[torch.distributed.get_rank()]).sum() * 0).backward()
    torch.optim.SGD(model.parameters(), lr=1.0).step()
    after = lowband.full_state_dict(model)
    return {name: before[name] - after[name] for name in before if "router" in name}


def _summed(counts: torch.Tensor) -> torch.Tensor:
    total = counts.clone()
    torch.distributed.all_reduce(total)
    return total


def _tokens() -> torch.Tensor:
    return torch.randn(12, H, generator=torch.Generator().manual_seed(0))


def _auxiliary_alone() -> dict[str, torch.Tensor]:
    model = model_of(LOSS)
    (model(_tokens()).sum() * 0).backward()
    return {name: p.grad for name, p in model.named_parameters() if "router" in name and p.grad is not None}


def test_the_auxiliary_loss_is_that_of_one_process_with_all_tokens() -> None:
    """Its scale is the same on any number of ranks (Megatron-LM PRs 3768 and 5047)."""
    [expected] = on_ranks(1, _auxiliary_alone)
    for expert in (1, 2):
        found = on_ranks(2, _auxiliary, expert)[0]
        for name, gradient in expected.items():
            assert gradient.abs().max() > 1e-4
            torch.testing.assert_close(found[name], gradient, rtol=1e-4, atol=1e-6)


def _with_nan(route: str) -> list[bool]:
    """Whether the losses of two steps and a norm are numbers; rank 1 has a NaN in the second step."""
    model = model_of()
    topology = lowband.Topology({}, lowband.Axes(expert=2, route=route))
    lowband.shard(lowband.spread_experts(model, topology), "zero3", topology, Layer, torch.float32)
    are_numbers = []
    for step in range(2):
        x = torch.randn(5, H)
        if step and torch.distributed.get_rank():
            x[3] = torch.nan
        loss = model(x).square().sum()
        loss.backward()
        are_numbers.append(bool(loss.isfinite()))
    return [*are_numbers, bool(lowband.clip_grad_norm_(model, 1.0).isfinite())]


@pytest.mark.parametrize("route", ["flat", "merged"])
def test_what_is_not_a_number_is_seen_in_the_loss_and_the_norm(route: str) -> None:
    assert on_ranks(2, _with_nan, route) == [[True, True, False], [True, False, False]]
