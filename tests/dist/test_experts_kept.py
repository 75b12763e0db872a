"""What layers of experts on several ranks keep for their backward, as autograd's hooks count it, beside the
closed form: exact, because the tokens choose every combination of experts equally often."""

from functools import partial
from itertools import combinations
from typing import NamedTuple

import pytest
import torch
from kept import kept_by
from torch.utils.checkpoint import checkpoint

import lowband
from lowband.cost.activations import kept_bytes_per_token
from lowband.cost.experts import copied_bytes
from lowband.run.on_ranks import on_ranks
from lowband.spec.axes import Axes, Ways
from lowband.spec.mesh import Levels
from lowband.spec.model import ModelSpec
from lowband.spec.step import Route

HIDDEN, WIDTH, EXPERTS, TOP_K = 64, 96, 8, 2
MODEL = ModelSpec(
    name="layer", layers=1, hidden=HIDDEN, heads=1, vocab=8, seq_len=8, experts=EXPERTS, top_k=TOP_K,
    expert_hidden=WIDTH, gated=True, source="none",
)  # fmt: skip
BESIDE = 2 * 3 * HIDDEN + 2 * 3 * HIDDEN + 2 * HIDDEN + 4  # of attention, and norms' inputs
TWO, THREE = {"node": 2}, {"package": 2, "node": 4}


class Kept(NamedTuple):
    """Of a rank.

    per_token: bytes of all storages but parameters', for `tokens` tokens more; fixed: and beside them
    """

    tokens: int
    per_token: int
    fixed: int


def kept(
    ranks: int,
    inner: dict[str, int],
    route: Route,
    hot: tuple[int, ...] = (),
    again: bool = False,
    model: ModelSpec = MODEL,
    parts: int = 1,
) -> Kept:
    """again: the forward is computed once more in the backward"""
    axes = Axes(expert=ranks, route=route, copies=len(hot), route_parts=parts)
    topology = lowband.Topology(inner, axes)
    routing = lowband.Routing(EXPERTS, model.top_k)
    layer = lowband.MixtureOfExperts(HIDDEN, WIDTH, routing, gated=model.gated)
    with torch.no_grad():
        layer.router.weight.copy_(torch.eye(EXPERTS, HIDDEN))
    if ranks > 1:
        layer = lowband.spread_experts(layer, topology)  # type: ignore[assignment]
    if hot:
        layer.experts.hot.set(hot)
    layer = layer.to(torch.bfloat16)
    tokens, once = _kept(layer, model.top_k, 1, again)
    _, twice = _kept(layer, model.top_k, 2, again)
    return Kept(tokens, twice - once, 2 * once - twice)


def _kept(layer: torch.nn.Module, top_k: int, repeats: int, again: bool) -> tuple[int, int]:
    """Tokens, and bytes of all of these."""
    choices = [*combinations(range(EXPERTS), top_k)] * repeats
    x = torch.zeros(len(choices), HIDDEN, dtype=torch.bfloat16)
    for token, chosen in enumerate(choices):
        x[token, list(chosen)] = 1.0
    x.requires_grad_()
    forward = partial(checkpoint, layer, use_reentrant=False) if again else layer
    return len(x), kept_by(layer, forward, x)


def closed(
    ranks: int, inner: dict[str, int], route: Route, model: ModelSpec = MODEL, parts: int = 1
) -> float:
    """Bytes per token."""
    levels, axes = Levels.fit(inner, ranks), Ways(expert=ranks, route=route, route_parts=parts)
    return kept_bytes_per_token(model, 8, "none", "flash", axes, of_experts=levels).block - BESIDE


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("top_k", [1, 4])
def test_one_process_keeps_the_closed_form(top_k: int, gated: bool) -> None:
    model = MODEL.model_copy(update={"top_k": top_k, "gated": gated})
    [found] = on_ranks(1, kept, 1, {}, "merged", (), False, model)
    assert found.per_token == found.tokens * closed(1, {}, "merged", model)


@pytest.mark.parametrize("route", ["flat", "hops", "merged"])
@pytest.mark.parametrize(
    ("ranks", "inner"), [(2, {}), (4, TWO), pytest.param(8, THREE, marks=pytest.mark.wide)]
)
def test_ranks_keep_the_closed_form(ranks: int, inner: dict[str, int], route: Route) -> None:
    found = on_ranks(ranks, kept, ranks, inner, route)
    tokens = sum(each.tokens for each in found)
    expected = tokens * closed(ranks, inner, route)
    assert sum(each.per_token for each in found) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("route", ["flat", "merged"])
def test_tokens_in_parts_keep_the_closed_form(route: Route) -> None:
    found = on_ranks(4, kept, 4, TWO, route, (), False, MODEL, 3)
    expected = sum(each.tokens for each in found) * closed(4, TWO, route, parts=3)
    assert sum(each.per_token for each in found) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("route", ["flat", "hops", "merged"])
def test_copies_are_kept_beside(route: Route) -> None:
    """Weights of copies, and of a rank's own experts with them; merged, fewer rows besides, as tokens of
    copied experts stay in their group."""
    hot = (0, 1, 4)  # of ranks 0 and 2, whose places in their nodes are the same
    found, before = (on_ranks(4, kept, 4, TWO, route, *copied) for copied in ((hot,), ()))
    weights, others = 3 * HIDDEN * WIDTH * 2, (3 if route == "flat" else 1)
    more = [mine.fixed - theirs.fixed for mine, theirs in zip(found, before, strict=True)]
    assert sum(more) == weights * (EXPERTS + len(hot) * others)
    assert max(more) <= copied_bytes(MODEL, Levels.fit(TWO, 4), route, "bf16", len(hot))
    of_tokens = sum(each.per_token for each in found) / sum(each.per_token for each in before)
    assert of_tokens == 1 if route != "merged" else 0.8 < of_tokens < 1


def test_no_rank_has_more_copies_than_there_are_others_experts() -> None:
    weights = 3 * HIDDEN * WIDTH * 2
    of = MODEL, Levels.fit(TWO, 4)
    assert [copied_bytes(*of, "merged", "bf16", copies) for copies in (0, 1, 2, 8)] == [
        0, 3 * weights, 4 * weights, 4 * weights,
    ]  # fmt: skip
    assert copied_bytes(*of, "flat", "bf16", 8) == 8 * weights
    assert copied_bytes(MODEL, Levels.fit({}, 1), "flat", "bf16", 8) == 0


def test_a_repeated_forward_keeps_no_copies() -> None:
    """They are sent again instead."""
    for each in on_ranks(2, kept, 2, {}, "flat", (0, 5), True):
        assert (each.per_token, each.fixed) == (each.tokens * HIDDEN * 2, 0)
