"""Linear attention over ranks along context, against one process that has the whole sequence."""

from functools import cache
from itertools import accumulate

import pytest
import torch
from torch import nn

import lowband
from lowband.cost.states import sent_by_level
from lowband.engine.parallel.linear import linear_attention, normalized, reference
from lowband.errors import UserError
from lowband.run.on_ranks import on_ranks
from lowband.spec.context import ways_of
from lowband.spec.mesh import Levels
from lowband.spec.model import CHUNK
from lowband.spec.step import States
from tests.refused import refusal

B, H, D, E = 1, 3, 7, 5  # a state has 105 values, which no group divides
STATES: tuple[States, ...] = ("pass", "gather", "scan")
Inner = tuple[tuple[str, int], ...]
TWO, FOUR = (("node", 2),), (("node", 4),)
THREE = (("package", 2), ("node", 4))


def _whole(tokens: int, dtype: torch.dtype = torch.float64) -> list[torch.Tensor]:
    """q, k, v and the gradient of the output."""
    torch.manual_seed(0)
    return [torch.randn(B, H, tokens, width, dtype=torch.float64).to(dtype) for width in (D, D, E, E)]


@cache
def _topology(inner: Inner, ranks: int) -> lowband.Topology:
    """One for all cases: its process groups take longer than a case."""
    return lowband.Topology(dict(inner), lowband.Axes(context=ranks, zigzag=False))


def _step_by_step(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    state, found = torch.zeros(B, H, D, v.shape[-1], dtype=q.dtype), []
    for t in range(q.shape[2]):
        state = state + k[:, :, t].unsqueeze(-1) * v[:, :, t].unsqueeze(-2)
        found.append((q[:, :, t].unsqueeze(-2) @ state).squeeze(-2))
    return torch.stack(found, 2)


@pytest.mark.parametrize("tokens", [1, CHUNK - 1, CHUNK, 2 * CHUNK + 7])
def test_chunks_are_exact(tokens: int) -> None:
    *qkv, g = _whole(tokens)
    found = []
    for attend in (_step_by_step, reference, linear_attention):
        own = [x.clone().requires_grad_() for x in qkv]
        (out := attend(*own)).backward(g)
        found.append([out, *(x.grad for x in own)])
    for theirs in found[1:]:
        for a, b in zip(theirs, found[0], strict=True):
            torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


def test_single_precision_and_half() -> None:
    """Half is rounded at the end alone: states are in fp32."""
    qkv = [x.to(torch.bfloat16) for x in _whole(2 * CHUNK)[:3]]
    single = linear_attention(*(x.float() for x in qkv))
    expected = reference(*(x.double() for x in qkv))
    assert (single - expected).abs().max() < 1e-6 * expected.abs().max()
    assert torch.equal(linear_attention(*qkv), single.to(torch.bfloat16))


def test_autocast_does_not_round_states() -> None:
    *qkv, g = _whole(2 * CHUNK, torch.float32)
    found = []
    for is_on in (False, True):
        mine = [x.clone().requires_grad_() for x in qkv]
        with torch.autocast("cpu", torch.bfloat16, enabled=is_on):
            out = linear_attention(*mine)
            out.backward(g)
        found.append([out, *(x.grad for x in mine)])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_normalized_weights_are_those_of_the_paper() -> None:
    """Equation 7 of Katharopoulos et al., term by term."""
    q, k, v, _ = _whole(5)
    found = normalized(q, k, v, linear_attention)
    f = lambda x: torch.where(x > 0, x + 1, x.exp())  # noqa: E731
    for t in range(5):
        weights = [(f(q[:, :, t]) * f(k[:, :, s])).sum(-1, keepdim=True) for s in range(t + 1)]
        expected = sum(w * v[:, :, s] for s, w in enumerate(weights)) / sum(weights)
        torch.testing.assert_close(found[:, :, t], expected, rtol=1e-13, atol=1e-13)


Case = tuple[Inner, int, States, int]  # levels, ranks, how, tokens


def _differences(cases: list[Case]) -> list[float]:
    """The largest relative one of outputs and gradients."""
    found = []
    for inner, ranks, states, tokens in cases:
        context = lowband.Context(_topology(inner, ranks), "state", states=states)
        *qkv, g = _whole(tokens)
        theirs = [x.clone().requires_grad_() for x in qkv]
        (expected := reference(*theirs)).backward(g)
        mine = [context.split(x, 2).requires_grad_() for x in qkv]
        (out := context.linear_attention(*mine)).backward(context.split(g, 2))
        real = (context.positions(tokens) < tokens).unsqueeze(1)
        pairs = [(out, expected), *((a.grad, b.grad) for a, b in zip(mine, theirs, strict=True))]
        errors = [(a - context.split(b, 2)).mul(real).abs().max() / b.abs().max() for a, b in pairs]
        found.append(max(errors).item())
    return found


LEVELS: list[tuple[Inner, int]] = [((), 1), ((), 2), ((), 4), (TWO, 4), (TWO, 8), (FOUR, 8), (THREE, 8)]


@pytest.mark.parametrize("ranks", [1, 2, 4, pytest.param(8, marks=pytest.mark.wide)])
def test_each_way_of_states_is_exact(ranks: int) -> None:
    shapes = [each for each in LEVELS if each[1] == ranks]
    cases = [(*shape, states, tokens) for shape in shapes for states in STATES for tokens in (45, 16)]
    for errors in on_ranks(ranks, _differences, cases):
        for case, error in zip(cases, errors, strict=True):
            assert error < 1e-12, case


@pytest.mark.wide
def test_each_way_is_exact_on_16_ranks() -> None:
    cases = [(inner, 16, states, 90) for inner in (FOUR, THREE) for states in STATES]
    for errors in on_ranks(16, _differences, cases):
        for case, error in zip(cases, errors, strict=True):
            assert error < 1e-12, case


# ---- bits


class _Alone:
    """The exchanges of one rank's tokens, on one process: its own states are kept, other ranks' are given."""

    def __init__(self, before: torch.Tensor | None = None, behind: torch.Tensor | None = None) -> None:
        self._given, self.states = {"before": before, "behind": behind}, []

    def _of(self, state: torch.Tensor, which: str) -> "_Alone":
        self.states.append(state.clone())
        self._found = torch.zeros_like(state) if self._given[which] is None else self._given[which]
        return self

    def sum_before(self, state: torch.Tensor) -> "_Alone":
        return self._of(state, "before")

    def sum_behind(self, grad: torch.Tensor) -> "_Alone":
        return self._of(grad, "behind")

    def wait(self) -> torch.Tensor:
        return self._found


def _added(states: list[torch.Tensor], groups: list[int]) -> list[torch.Tensor]:
    """By rank the sum of those before. groups: how many make one, inner first; the last is all that are left

    What lies before the group, and what lies before in it, each from its first.
    """
    size, *outer = groups
    zero = torch.zeros_like(states[0])
    inside = [states[i : i + size] for i in range(0, len(states), size)]
    sums = [[*accumulate(group, initial=zero)] for group in inside]
    before = _added([of_group[-1] for of_group in sums], outer) if outer else [zero] * len(inside)
    return [base + each for base, of_group in zip(before, sums, strict=True) for each in of_group[:-1]]


def _as_one(parts: list[list[torch.Tensor]], groups: list[int]) -> list[list[torch.Tensor]]:
    """Outputs and gradients by rank, on one process that adds states in the order of the ranks."""

    def run(exchanges: _Alone, part: list[torch.Tensor]) -> list[torch.Tensor]:
        *qkv, g = (x.clone() for x in part)
        own = [x.requires_grad_() for x in qkv]
        (out := linear_attention(*own, exchanges)).backward(g)  # type: ignore[arg-type]
        return [out.detach(), *(x.grad for x in own)]  # type: ignore[list-item]

    first = [_Alone() for _ in parts]
    for exchanges, part in zip(first, parts, strict=True):
        run(exchanges, part)
    states, grads = ([each.states[i] for each in first] for i in (0, 1))
    before, behind = _added(states, groups), _added(grads[::-1], groups)[::-1]
    return [run(_Alone(*given), part) for *given, part in zip(before, behind, parts, strict=True)]


def _bits(cases: list[Case]) -> list[bool]:
    """Whether outputs and gradients have those of one process that adds in the same order."""
    found = []
    for inner, ranks, states, tokens in cases:
        topology = _topology(inner, ranks)
        context, place = lowband.Context(topology, "state", states=states), topology.along("context").place
        whole = _whole(tokens, torch.float32)
        hops = topology.along("context").levels.hops("self", "world")
        groups = [hop.count for hop in hops] if states == "scan" else [ranks]
        parts = [[x.chunk(ranks, 2)[rank].contiguous() for x in whole] for rank in range(ranks)]
        expected = _as_one(parts, groups)[place]
        *mine, g = (context.split(x, 2) for x in whole)
        own = [x.requires_grad_() for x in mine]
        (out := context.linear_attention(*own)).backward(g)
        pairs = zip([out, *(x.grad for x in own)], expected, strict=True)
        found.append(all(torch.equal(a, b) for a, b in pairs))  # type: ignore[arg-type]
    return found


@pytest.mark.parametrize(
    ("ranks", "inners"),
    [
        (4, [(), TWO]),
        pytest.param(8, [TWO, THREE], marks=pytest.mark.wide),
        pytest.param(16, [FOUR], marks=pytest.mark.wide),
    ],
)
def test_bits_are_those_of_one_process_that_adds_in_the_same_order(ranks: int, inners: list[Inner]) -> None:
    """On 2 x 2 ranks any order of two is the same; on 4 x 2 and 4 x 4 it is not."""
    cases = [(inner, ranks, states, ranks * (CHUNK + 5)) for inner in inners for states in STATES]
    for same in on_ranks(ranks, _bits, cases):
        assert [case for case, is_same in zip(cases, same, strict=True) if not is_same] == []


def test_the_order_of_a_scan_is_not_that_of_a_gather() -> None:
    """Or the test above would not see it."""
    generator = torch.Generator().manual_seed(0)
    states = [torch.randn(64, generator=generator) for _ in range(8)]
    flat, scanned = (_added(states, groups)[-1] for groups in ([8], [2, 4]))
    assert not torch.equal(flat, scanned)
    torch.testing.assert_close(flat, scanned)


# ---- bytes


def _sent(inner: Inner, ranks: int, states: States, tokens: int) -> dict[tuple[str, str], float]:
    context = lowband.Context(_topology(inner, ranks), "state", states=states)
    mine = [context.split(x, 2).requires_grad_() for x in _whole(tokens)[:3]]
    context.linear_attention(*mine).sum().backward()
    return {(sent.collective, sent.level): sent.bytes for sent in context.ledger.take()}


def _all_sent(cases: list[Case]) -> list[dict[tuple[str, str], float]]:
    return [_sent(*case) for case in cases]


S = B * H * D * E  # values of a state
HAND: list[tuple[Inner, int, States, dict[str, float]]] = [
    (TWO, 8, "pass", {"node": S * 4 / 8, "world": S * 3 / 8}),  # of 7 sends 4 stay in a node
    (TWO, 8, "gather", {"node": S * 4, "world": S * 3}),
    (TWO, 8, "scan", {"node": 106 + 53, "world": 53 * 3}),  # filled up to 106
    (THREE, 8, "scan", {"package": 108 + 54, "node": 54 + 27, "world": 27}),
]


def test_bytes_are_the_closed_form_whatever_the_length() -> None:
    cases = [(inner, ranks, states, tokens) for inner, ranks, states, _ in HAND for tokens in (16, 200)]
    found = on_ranks(8, _all_sent, cases)
    for i, (inner, ranks, states, expected) in enumerate(HAND):
        levels = Levels.fit(dict(inner), ranks)
        assert {level: float(n) for level, n in sent_by_level(states, S, levels).items()} == expected
        for of_length in (2 * i, 2 * i + 1):
            for row in (f"context_state_{states}", f"context_state_{states}_grad"):
                sent = {level: sum(of[of_length][row, level] for of in found) / ranks for level in expected}
                assert sent == {level: 8 * elements for level, elements in expected.items()}
            assert {row for row, _ in found[0][of_length]} == {
                f"context_state_{states}", f"context_state_{states}_grad",
            }  # fmt: skip


def test_a_scan_sends_fewer_bytes_over_slow_links_by_the_ranks_of_a_group() -> None:
    for inner, ranks, times in ((TWO, 8, 2), (FOUR, 16, 4), ((("package", 2), ("node", 8)), 64, 8)):
        levels = Levels.fit(dict(inner), ranks)
        gather, scan = (sent_by_level(states, 64 * S, levels)["world"] for states in ("gather", "scan"))
        assert gather == times * scan


def test_a_state_that_a_group_does_not_divide_is_filled_up() -> None:
    sent = sent_by_level("scan", 7, Levels.fit({"node": 4}, 8))
    assert sent == {"node": 3 * 8 + 3 * 2, "world": 2}


# ---- refused


def _refused() -> list[str]:
    topology, x = _topology((), 2), torch.zeros(1, 2, 8, 4)
    state = lowband.Context(topology, "state")
    ring = lowband.Context(topology, "ring")
    return [
        refusal(lambda: state.attention(x, x, x)),
        refusal(lambda: ring.linear_attention(x, x, x)),
        refusal(lambda: lowband.Context(topology, "heads").linear_attention(x, x, x)),
        refusal(lambda: lowband.Context(topology, "state", zigzag=True)),
        refusal(lambda: lowband.Context(topology, "state", states="tree")),  # type: ignore[arg-type]
        refusal(lambda: state.split(torch.zeros(1, 1))),
        refusal(lambda: state.linear_attention(x, x[:, :1], x)),
        refusal(lambda: state.bind(nn.Sequential(nn.Conv1d(4, 4, 3)))),
    ]


LINES = [
    "context_attention state: softmax has no state: it needs every key (allowed: heads, gather, ring)",
    "context_attention ring: is for keys and values, and linear layers exchange states (allowed: state; ",
    "context_attention heads: is for keys and values, and linear layers exchange states",
    "zigzag gives a rank tokens of both ends of a sequence, and states walk them in order",
    "context_states: unknown way 'tree' (allowed: auto, pass, gather, scan)",
    "1 tokens are too few for 2 ranks",
    "q and k [B, H, T, D], v [B, H, T, E]",
    "Conv1d needs the tokens of a whole sequence, in order",
]


def test_what_cannot_be_is_refused_in_a_line() -> None:
    for found in on_ranks(2, _refused):
        for message, line in zip(found, LINES, strict=True):
            assert line in message
            assert "\n" not in message


def test_state_is_for_all_levels() -> None:
    with pytest.raises(UserError, match="state on one level and heads on another"):
        ways_of("node=heads,world=state", Levels.fit({"node": 2}, 4))
