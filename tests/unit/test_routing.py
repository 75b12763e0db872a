"""Which experts a router chooses, and with what weight, against what the definitions say pair by pair."""

import math
import re
import warnings
from typing import Any

import pytest
import torch

from lowband.engine.parallel import routing as module
from lowband.engine.parallel.routing import Routed, Router
from lowband.errors import UserError
from lowband.spec.routing import Routing

HIDDEN, EXPERTS, TOKENS = 12, 8, 40


def router(**given: Any) -> Router:
    """A router in fp64."""
    torch.manual_seed(3)
    return Router(HIDDEN, Routing(**{"experts": EXPERTS, "top_k": 2, **given}), dtype=torch.float64)


def rows(tokens: int = TOKENS) -> torch.Tensor:
    return torch.randn(tokens, HIDDEN, dtype=torch.float64, generator=torch.Generator().manual_seed(5))


def pairs(routed: Routed) -> list[tuple[int, int]]:
    return list(zip(routed.tokens_P.tolist(), routed.experts_P.tolist(), strict=True))


def scores_of(router: Router, x: torch.Tensor) -> torch.Tensor:
    logits = x @ router.weight.T
    return logits.softmax(-1) if router.routing.scores == "softmax" else logits.sigmoid()


def falling(scores: list[float]) -> list[int]:
    """Experts by falling score, of equal ones the lower first."""
    return sorted(range(len(scores)), key=lambda expert: (-scores[expert], expert))


@pytest.mark.parametrize("scores", ["softmax", "sigmoid"])
@pytest.mark.parametrize("normalized", [True, False])
@pytest.mark.parametrize("top_k", [1, 3, EXPERTS])
def test_tokens_choose(scores: str, normalized: bool, top_k: int) -> None:
    r, x = router(scores=scores, normalized=normalized, top_k=top_k, scale=2.5), rows()
    routed, all_scores = r(x), scores_of(r, x)
    best = [falling(row)[:top_k] for row in all_scores.tolist()]
    assert pairs(routed) == [(token, expert) for token, chosen in enumerate(best) for expert in chosen]
    weights = torch.stack([row[chosen] for row, chosen in zip(all_scores, best, strict=True)])
    if normalized:
        weights = weights / weights.sum(1, keepdim=True)
    torch.testing.assert_close(routed.weights_P, 2.5 * weights.flatten(), rtol=1e-14, atol=0)
    assert (routed.tokens_P.dtype, routed.experts_P.dtype) == (torch.int64, torch.int64)


def test_defaults_are_the_papers() -> None:
    """The bias moves by 0.001 (arXiv 2408.15664), the loss counts a hundredth (arXiv 2101.03961, 2.2)."""
    assert (Routing(8, 2).rate, Routing(8, 2).loss_weight) == (0.001, 0.01)


def test_the_routers_gradient_is_that_of_the_weights() -> None:
    r, x = router(normalized=True, scores="sigmoid"), rows().requires_grad_()
    sum_of = torch.arange(2.0 * TOKENS, dtype=torch.float64)
    (r(x).weights_P * sum_of).sum().backward()
    found = x.grad, r.weight.grad
    x.grad = r.weight.grad = None
    chosen = scores_of(r, x).topk(2).values
    ((chosen / chosen.sum(1, keepdim=True)).flatten() * sum_of).sum().backward()
    for mine, plain in zip(found, (x.grad, r.weight.grad), strict=True):
        torch.testing.assert_close(mine, plain, rtol=1e-12, atol=1e-12)


def test_of_equal_scores_the_lower_expert_is_first() -> None:
    r = router(top_k=3)
    torch.nn.init.zeros_(r.weight)
    assert r(rows(4)).experts_P.tolist() == [0, 1, 2] * 4


@pytest.mark.parametrize("group_score", ["best", "best two"])
def test_a_tokens_experts_are_of_few_groups(group_score: str) -> None:
    r = router(top_k=3, groups=4, top_groups=2, group_score=group_score)
    x = rows()
    used = 1 if group_score == "best" else 2
    expected = []
    for row in scores_of(r, x).tolist():
        of_group = [sum(sorted(row[2 * g : 2 * g + 2])[-used:]) for g in range(4)]
        kept = falling(of_group)[:2]
        expected.append([expert for expert in falling(row) if expert // 2 in kept][:3])
    assert r(x).experts_P.view(-1, 3).tolist() == expected


@pytest.mark.parametrize("capacity", [0.5, 1.0, 1.25, 100.0])
def test_capacity_drops_later_tokens(capacity: float) -> None:
    r, free = router(capacity=capacity), router()
    most = math.ceil(capacity * 2 * TOKENS / EXPERTS)
    counts, kept = [0] * EXPERTS, []
    before = free(rows())
    for k, (_, expert) in enumerate(pairs(before)):
        counts[expert] += 1
        if counts[expert] <= most:
            kept.append(k)
    found = r(rows())
    assert pairs(found) == [pairs(before)[k] for k in kept]
    assert torch.equal(found.weights_P, before.weights_P[kept])  # what is dropped is lost, not redistributed
    assert (len(kept) < len(before.experts_P)) == (capacity < 100)


def test_a_capacity_is_as_it_is_written() -> None:
    """1.1 is a little above 11/10 in a computer, whose ceil(1.1 x 10) is 12."""
    assert Routing(10, 1, capacity=1.1).most_pairs(100) == 11
    assert Routing(10, 1).most_pairs(100) is None


@pytest.mark.filterwarnings("ignore:experts that choose")
@pytest.mark.parametrize("normalized", [True, False])
def test_experts_choose(normalized: bool) -> None:
    r, x = router(choice="expert", capacity=1.5, normalized=normalized), rows()
    scores, routed = scores_of(r, x), r(x)
    most = math.ceil(1.5 * 2 * TOKENS / EXPERTS)
    chosen = {
        (token, expert) for expert in range(EXPERTS) for token in falling(scores[:, expert].tolist())[:most]
    }
    ordered = [
        (token, expert)
        for token, row in enumerate(scores.tolist())
        for expert in falling(row)
        if (token, expert) in chosen
    ]
    assert pairs(routed) == ordered
    total = torch.zeros(TOKENS, dtype=torch.float64)
    for token, expert in ordered:
        total[token] += scores[token, expert].item()
    plain = torch.stack([scores[t, e] / (total[t] if normalized else 1) for t, e in ordered])
    torch.testing.assert_close(routed.weights_P, plain, rtol=1e-14, atol=0)


def test_experts_choose_no_more_tokens_than_there_are() -> None:
    assert pairs(router(choice="expert", capacity=8.0, top_k=8)(rows(2))) == pairs(router(top_k=8)(rows(2)))


def test_choice_by_experts_warns_once() -> None:
    module._warn.cache_clear()
    with pytest.warns(UserWarning, match="a causal model sees its future"):
        router(choice="expert")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        router(choice="expert")


@pytest.mark.parametrize(
    "given",
    [{}, {"capacity": 1.0}, {"choice": "expert"}, {"groups": 4, "top_groups": 2, "scores": "sigmoid"}],
    ids=str,
)
def test_no_tokens(given: dict[str, Any]) -> None:
    r, x = router(**given), rows(0).requires_grad_()
    routed = r(x)
    assert [len(each) for each in routed] == [0, 0, 0]
    routed.weights_P.sum().backward()
    assert x.grad.shape == (0, HIDDEN)
    assert r.weight.grad is None or not r.weight.grad.any()


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"normalized": True},
        {"capacity": 1.0},
        {"choice": "expert"},
        {"groups": 4, "top_groups": 2, "group_score": "best two", "scores": "sigmoid"},
    ],
    ids=str,
)
def test_a_score_that_is_no_number_stays_its_tokens(given: dict[str, Any]) -> None:
    x = rows()
    x[7] = torch.nan
    routed = router(**given)(x)
    is_of_7 = routed.tokens_P == 7
    assert is_of_7.any()
    assert torch.equal(routed.weights_P.isnan(), is_of_7)
    assert routed.experts_P.min() >= 0
    assert routed.experts_P.max() < EXPERTS


def test_scores_are_of_fp32_at_least() -> None:
    r = Router(HIDDEN, Routing(EXPERTS, 2), dtype=torch.bfloat16)
    x = rows().bfloat16()
    with torch.autocast("cpu", torch.bfloat16):
        found = r(x)
    assert found.weights_P.dtype == torch.float32
    expected = (x.float() @ r.weight.float().T).softmax(-1).topk(2).values.flatten()
    torch.testing.assert_close(found.weights_P, expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize(
    "given, message",
    [
        ({"top_k": 9}, "top_k: top_k 9 of 8 experts (allowed: 1 to 8)"),
        ({"top_k": 0}, "top_k: top_k 0 of 8 experts (allowed: 1 to 8)"),
        ({"experts": 0}, "experts: is 0 (allowed: 1 or more)"),
        ({"groups": 3}, "groups: 8 experts do not divide into 3 groups (allowed: what divides 8)"),
        ({"groups": 4, "top_groups": 5}, "top_groups: top_groups 5 of 4 groups (allowed: 1 to 4)"),
        (
            {"groups": 4, "top_k": 3},
            "top_groups: top_k 3, but 1 groups have 2 experts (allowed: 2 to 4)",
        ),
        (
            {"groups": 8, "top_groups": 2, "group_score": "best two"},
            "group_score: groups have one expert each (allowed: best)",
        ),
        ({"capacity": 0}, "capacity: is 0 (allowed: a positive number)"),
        ({"capacity": math.nan}, "capacity: is nan (allowed: a positive number)"),
        ({"scale": math.inf}, "scale: is inf (allowed: a positive number)"),
        ({"rate": -0.1}, "rate: is -0.1 (allowed: a positive number)"),
        ({"loss_weight": -1.0}, "loss_weight: is -1.0 (allowed: a positive number)"),
        ({"scores": "relu"}, "scores: unknown 'relu' (allowed: softmax, sigmoid)"),
        (
            {"choice": "expert", "balance": "bias"},
            "choice: experts that choose have equally many tokens, of any group "
            "(allowed: choice token, or balance none and groups 1)",
        ),
    ],
)
def test_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=f"^{re.escape(message)}$"):
        Routing(**{"experts": 8, "top_k": 2, **given})
