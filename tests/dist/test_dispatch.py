"""Tokens to experts of other ranks and back, against one process that has all tokens and all experts."""

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import pytest
import torch

from lowband.engine.collectives.experts import ExpertAxis
from lowband.engine.parallel.dispatch import Dispatch
from lowband.engine.parallel.hot_experts import HotExperts
from lowband.engine.transport.topology import Topology
from lowband.run.on_ranks import on_ranks
from lowband.spec.axes import Axes
from lowband.spec.step import Route

H, WIDTH, TWO = 16, 24, {"node": 2}
THREE = {"package": 2, "node": 4}


class Case(NamedTuple):
    """tokens: by rank; chosen: experts of a token, or its largest number, drawn, where `uneven`"""

    ranks: int
    inner: dict[str, int]
    tokens: tuple[int, ...]
    experts: int
    chosen: int
    uneven: bool = False


CASES = [
    Case(1, {}, (5,), 4, 2),
    Case(2, {}, (5, 9), 4, 2),
    Case(2, {}, (0, 7), 2, 2),
    Case(4, TWO, (6, 6, 6, 6), 8, 4),
    Case(4, TWO, (3, 0, 11, 1), 4, 3, uneven=True),
    Case(4, {}, (0, 0, 0, 3), 4, 1),
    Case(8, THREE, (7, 5, 0, 2, 9, 1, 4, 8), 16, 5, uneven=True),
    Case(8, TWO, (4,) * 8, 8, 8),
]
WIDE = pytest.mark.wide


class Pairs(NamedTuple):
    tokens: torch.Tensor
    experts: torch.Tensor
    weights: torch.Tensor


def inputs(case: Case) -> tuple[torch.Tensor, Pairs, torch.Tensor, torch.Tensor]:
    """Of all ranks: tokens, pairs, and experts' matrices."""
    torch.manual_seed(3)
    total = sum(case.tokens)
    scores = torch.rand(total, case.experts, dtype=torch.float64)
    best, experts = scores.topk(case.chosen, -1)
    kept = torch.rand(best.shape) < 0.6 if case.uneven else torch.ones(best.shape, dtype=torch.bool)
    tokens = torch.arange(total).unsqueeze(1).expand_as(experts)
    pairs = Pairs(tokens[kept], experts[kept], best[kept])
    up = torch.randn(case.experts, H, WIDTH, dtype=torch.float64) / H**0.5
    down = torch.randn(case.experts, WIDTH, H, dtype=torch.float64) / WIDTH**0.5
    return torch.randn(total, H, dtype=torch.float64), pairs, up, down


class Found(NamedTuple):
    """out and gradients of x, weights, up, down; sent: bytes by row and level"""

    out: torch.Tensor
    grads: list[torch.Tensor]
    sent: Counter[tuple[str, str]]


def computed(
    axis: ExpertAxis | None,
    total: int,
    x: torch.Tensor,
    pairs: Pairs,
    up: torch.Tensor,
    down: torch.Tensor,
    copied: Sequence[int] = (),
) -> Found:
    leaves = [t.clone().requires_grad_() for t in (x, pairs.weights, up, down)]
    x, weights, up, down = leaves
    hot = None if axis is None else HotExperts(axis, total, 0)
    if hot is not None:
        hot.set(copied)
        up, down = hot.weights(up, "up"), hot.weights(down, "down")

    def compute(
        x: torch.Tensor, counts: torch.Tensor, places: torch.Tensor, weights: torch.Tensor | None
    ) -> torch.Tensor:
        parts = x.index_select(0, places).split(counts.tolist())
        found = torch.cat([torch.relu(part @ a) @ b for part, a, b in zip(parts, up, down, strict=True)])
        return found if weights is None else found * weights.unsqueeze(1)

    out = Dispatch(axis, total, compute, "experts", hot)(x, pairs.tokens, pairs.experts, weights)
    out.square().sum().backward()
    grads = [leaf.grad for leaf in leaves]
    sent = Counter() if axis is None else counted(axis)
    return Found(out.detach(), [g for g in grads if g is not None], sent)


def counted(axis: ExpertAxis) -> Counter[tuple[str, str]]:
    found: Counter[tuple[str, str]] = Counter()
    for sent in axis.ledger.take():
        found[sent.collective, sent.level] += sent.bytes
    return +found


def on_rank(case: Case, route: Route, copied: Sequence[int] = (), parts: int = 1) -> Found:
    topology = Topology(case.inner, Axes(expert=case.ranks, route=route))
    axis = ExpertAxis(topology.along("expert"), topology.along("alike"), route, parts)
    x, pairs, up, down = inputs(case)
    first = sum(case.tokens[: axis.place])
    mine = (pairs.tokens >= first) & (pairs.tokens < first + case.tokens[axis.place])
    own = Pairs(pairs.tokens[mine] - first, pairs.experts[mine], pairs.weights[mine])
    per = case.experts // case.ranks
    here = slice(axis.place * per, (axis.place + 1) * per)
    x = x[first : first + case.tokens[axis.place]]
    return computed(axis, case.experts, x, own, up[here], down[here], copied)


def alone(case: Case) -> Found:
    return computed(None, case.experts, *inputs(case))


def check(case: Case, found: Sequence[Found], to_the_bit: bool = False) -> Counter[tuple[str, str]]:
    """Ranks have what one process has. Returns what they have sent."""
    expected = on_ranks(1, alone, case)[0]
    joined = [torch.cat(parts) for parts in zip(*([one.out, *one.grads] for one in found), strict=True)]
    for mine, whole in zip(joined, [expected.out, *expected.grads], strict=True):
        assert not to_the_bit or torch.equal(mine, whole)
        torch.testing.assert_close(mine, whole, rtol=1e-12, atol=1e-12)
    return all_sent(found)


def all_sent(found: Sequence[Found]) -> Counter[tuple[str, str]]:
    return sum((one.sent for one in found), Counter[tuple[str, str]]())


@pytest.mark.parametrize("route", ["flat", "hops", "merged"])
@pytest.mark.parametrize(
    "case",
    [*CASES[:7], pytest.param(CASES[7], marks=WIDE)],
    ids=lambda case: f"{case.ranks}-{len(case.inner)}-{case.tokens}",
)
def test_as_one_process(case: Case, route: Route) -> None:
    """Flat: to the bit. Bytes: of the pairs that were drawn, there and back, forward and backward."""
    sent = check(case, on_ranks(case.ranks, on_rank, case, route), to_the_bit=route == "flat")
    rows = crossings(case, route)
    for row in ("route_out", "route_back", "route_out_grad", "route_back_grad"):
        assert {level: n for (name, level), n in sent.items() if name == row} == {
            level: n * H * 8 for level, n in rows.items()
        }, row


def crossings(case: Case, route: Route) -> dict[str, int]:
    """Rows that travel on each level's links to experts, of all ranks, counted pair by pair."""
    _, pairs, _, _ = inputs(case)
    sizes = [1, *case.inner.values(), case.ranks]
    names = ["self", *case.inner, "world"]
    per = case.experts // case.ranks
    ends = torch.tensor(case.tokens).cumsum(0)
    found: set[tuple[object, ...]] = set()
    for pair, (token, expert) in enumerate(zip(pairs.tokens.tolist(), pairs.experts.tolist(), strict=True)):
        at, goal = int((ends <= token).sum()), expert // per
        if route == "flat":
            level = next(i for i, size in enumerate(sizes) if at // size == goal // size)
            found |= {(names[level], pair)} if level else set()
            continue
        for level in range(len(sizes) - 1, 0, -1):  # from the outermost
            size, inside = sizes[level], sizes[level - 1]
            to = goal // inside % (size // inside) * inside + at // size * size + at % inside
            if to != at:
                what = token if route == "merged" else pair
                found.add((names[level], what, at, to))
                at = to
    return dict(Counter(str(level) for level, *_ in found))


@pytest.mark.parametrize("route", ["flat", "hops", "merged"])
@pytest.mark.parametrize(
    ("case", "copied"),
    [
        (Case(2, {}, (5, 9), 4, 2), [3]),
        (Case(4, TWO, (3, 0, 11, 1), 8, 3, uneven=True), [0, 1, 5]),
        (Case(4, TWO, (6, 6, 6, 6), 4, 2), [0, 1, 2, 3]),  # all: no token crosses the outermost level
        pytest.param(Case(8, THREE, (7, 5, 0, 2, 9, 1, 4, 8), 16, 5), [2, 3, 9], marks=WIDE),
    ],
)
def test_with_copies_as_one_process(case: Case, copied: list[int], route: Route) -> None:
    """Outputs and gradients, also of experts whose copies have computed; bytes of tokens and weights."""
    sent = check(case, on_ranks(case.ranks, on_rank, case, route, copied))
    sizes = [*case.inner.values()][-1:] if route != "flat" else []
    groups = case.ranks // (sizes or [1])[0]
    for row in ("expert_copies", "expert_copies_grad"):
        weights = sum(count for (name, _), count in sent.items() if name == row)
        assert weights == len(copied) * (groups - 1) * 2 * H * WIDTH * 8
    before = all_sent(on_ranks(case.ranks, on_rank, case, route))
    assert sent["route_out", "world"] < before["route_out", "world"]
    if len(copied) == case.experts:
        assert sent["route_out", "world"] == 0


@pytest.mark.parametrize("route", ["flat", "hops", "merged"])
@pytest.mark.parametrize(
    "case", [CASES[2], CASES[4], pytest.param(CASES[6], marks=WIDE)], ids=lambda case: f"{case.ranks}"
)
def test_in_parts_as_one_process(case: Case, route: Route) -> None:
    """Ranks with fewer tokens than parts, too; bytes of rows as in one part, of counts three times these."""
    sent = check(case, on_ranks(case.ranks, on_rank, case, route, (), 3))
    before = all_sent(on_ranks(case.ranks, on_rank, case, route))
    assert sent == {key: count * (3 if key[0] == "route_counts" else 1) for key, count in before.items()}


def test_merging_sends_less_over_slow_links() -> None:
    """All experts of the other node are one row: as many slow rows as tokens, 4 times fewer than pairs."""
    case = CASES[-1]
    assert crossings(case, "merged")["world"] * 2 == crossings(case, "hops")["world"]
    assert crossings(case, "hops")["world"] == crossings(case, "flat")["world"]
