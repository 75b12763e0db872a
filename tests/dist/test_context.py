"""Attention over ranks along context, against one process that has the whole sequence."""

from functools import cache
from itertools import pairwise, product

import pytest
import torch
import torch.nn.functional as F

import lowband
from lowband.errors import UserError
from lowband.run.on_ranks import on_ranks
from lowband.spec.context import Layout, ways_of
from lowband.spec.mesh import Levels
from lowband.spec.model import AttentionKernel
from tests.pairwise import covering

B, E = 2, 8
Case = tuple[dict[str, int], int, str | dict[str, str]]


def _whole(heads: int, groups: int, tokens: int, dtype: torch.dtype) -> list[torch.Tensor]:
    torch.manual_seed(0)
    sizes = heads, groups, groups, heads
    return [torch.randn(B, size, tokens, E, dtype=torch.float64).to(dtype) for size in sizes]


def _expected(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, documents: torch.Tensor | None
) -> torch.Tensor:
    if documents is None:
        return F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True)
    seen = documents.unsqueeze(2) == documents.unsqueeze(1)
    seen = (seen.tril() if causal else seen).unsqueeze(1)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=seen, enable_gqa=True)


@cache
def _topology(inner: tuple[tuple[str, int], ...], ranks: int) -> lowband.Topology:
    """One for all cases: its process groups take longer than a case."""
    return lowband.Topology(dict(inner), lowband.Axes(context=ranks))


def _errors(
    case: Case,
    zigzag: bool,
    tokens: int = 32,
    heads: tuple[int, int] = (8, 8),
    dtype: torch.dtype = torch.float64,
    causal: bool = True,
    packed: bool | str = False,
    inside_out: bool = False,
    kernel: AttentionKernel = "sdpa",
) -> tuple[float, dict[str, float]]:
    """The largest relative error of outputs and gradients; bytes by row.

    packed:     documents; "apart": whose tokens lie in several places
    inside_out: neighbours in a head's dimension are not neighbours in memory
    """
    inner, ranks, ways = case
    context = lowband.Context(_topology(tuple(inner.items()), ranks), ways, zigzag)
    *qkv, g = _whole(*heads, tokens, dtype)
    documents = torch.randint(3, (B, tokens)) if packed else None
    if documents is not None and packed != "apart":
        documents = documents.sort(dim=1).values
    theirs = [x.clone().requires_grad_() for x in qkv]
    expected = _expected(*theirs, causal, documents)
    expected.backward(g)
    mine = [context.split(x, 2) for x in qkv]
    if inside_out:
        mine = [x.mT.contiguous().mT for x in mine]
    mine = [x.requires_grad_() for x in mine]
    own = None if documents is None else context.split(documents, fill=-1)
    found = context.attention(*mine, causal=causal, documents=own, tokens=tokens, kernel=kernel)
    found.backward(context.split(g, 2))
    real = (context.positions(tokens) < tokens).unsqueeze(1)
    pairs = [(found, expected), *((a.grad, b.grad) for a, b in zip(mine, theirs, strict=True))]
    errors = [((a - context.split(b, 2)).mul(real).abs().max() / b.abs().max()).item() for a, b in pairs]
    return max(errors), {sent.collective: sent.bytes for sent in context.ledger.take()}


def _all(cases: list[dict]) -> list[float]:
    return [_errors(**case)[0] for case in cases]


TWO = {"node": 2}
THREE = {"package": 2, "node": 4}
RANKS: list[Case] = [
    ({}, 1, "ring"), ({}, 2, "ring"), ({}, 2, "gather"), ({}, 2, "heads"),
    (TWO, 4, "ring"), (TWO, 4, "gather"), (TWO, 4, "heads"),
    (TWO, 4, {"node": "heads", "world": "ring"}), (TWO, 4, {"node": "heads", "world": "gather"}),
    (TWO, 4, {"node": "gather", "world": "ring"}),
    ({}, 8, "ring"), ({"node": 4}, 8, {"node": "gather", "world": "ring"}),
    (THREE, 8, {"package": "heads", "node": "gather", "world": "ring"}), (THREE, 8, "gather"),
    (THREE, 8, "heads"), ({"node": 4}, 8, {"node": "heads", "world": "ring"}),
]  # fmt: skip


MORE: list[dict] = [
    {}, {"causal": False}, {"heads": (8, 4)}, {"tokens": 27}, {"tokens": 27, "causal": False},
    {"packed": True}, {"packed": True, "tokens": 29, "causal": False},
]  # fmt: skip


@pytest.mark.parametrize(
    ("ranks", "some"),
    [
        *((ranks, "pairs") for ranks in (1, 2, 4)),
        *(pytest.param(ranks, "all", marks=pytest.mark.wide) for ranks in (2, 4, 8)),
    ],
)
def test_each_way_is_exact(ranks: int, some: str) -> None:
    of_ranks = [number for number, case in enumerate(RANKS) if case[1] == ranks]
    every = [*product(of_ranks, (False, True), range(len(MORE)))]
    chosen = every if some == "all" else sorted(covering(every))
    cases = [{"case": RANKS[i], "zigzag": zigzag, **MORE[j]} for i, zigzag, j in chosen]
    found = on_ranks(ranks, _all, cases)
    for errors in found:
        for case, error in zip(cases, errors, strict=True):
            assert error < 1e-12, case


def test_single_precision_and_half() -> None:
    cases: list[dict] = [
        {"case": case, "zigzag": True, "heads": (8, 4), "dtype": dtype}
        for case in RANKS if case[1] == 4 for dtype in (torch.float32, torch.bfloat16)
    ]  # fmt: skip
    for errors in on_ranks(4, _all, cases):
        for case, error in zip(cases, errors, strict=True):
            assert error < (1e-5 if case["dtype"] == torch.float32 else 2e-2), case


@pytest.mark.parametrize("ranks", [1, 2])
def test_heads_whose_dimension_is_not_the_last_in_memory(ranks: int) -> None:
    ways = ("ring", "gather", "heads") if ranks > 1 else ("ring",)
    cases = [{"case": ({}, ranks, way), "zigzag": False, "inside_out": True} for way in ways]
    for errors in on_ranks(ranks, _all, cases):
        assert max(errors) < 1e-12, errors


def _under_autocast() -> bool:
    """Whether documents are attended to, and gradients are, with the bits of no autocast."""
    context = lowband.Context(_topology((("node", 2),), 2), "ring")
    q, k, v, g = (context.split(x, 2) for x in _whole(4, 4, 32, torch.float32))
    documents = context.split(torch.zeros(B, 32, dtype=torch.long), fill=-1)
    found = []
    for is_on in (False, True):
        mine = [x.clone().requires_grad_() for x in (q, k, v)]
        with torch.autocast("cpu", torch.bfloat16, enabled=is_on):
            out = context.attention(*mine, documents=documents)
            out.backward(g)
        found.append([out, *(x.grad for x in mine)])
    return all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_autocast_does_not_round_scores() -> None:
    assert all(on_ranks(2, _under_autocast))


def _bits(inner: dict[str, int], ranks: int, dtype: torch.dtype) -> list[bool]:
    """Whether outputs and gradients of heads have the bits of one process."""
    context = lowband.Context(_topology(tuple(inner.items()), ranks), "heads")
    *qkv, g = _whole(8, 8, 32, dtype)
    theirs = [x.clone().requires_grad_() for x in qkv]
    (expected := F.scaled_dot_product_attention(*theirs, is_causal=True)).backward(g)
    mine = [context.split(x, 2).requires_grad_() for x in qkv]
    (found := context.attention(*mine)).backward(context.split(g, 2))
    pairs = [(found, expected), *((a.grad, b.grad) for a, b in zip(mine, theirs, strict=True))]
    return [torch.equal(a, context.split(b, 2)) for a, b in pairs]  # type: ignore[arg-type]


def test_heads_have_the_bits_of_one_process() -> None:
    for dtype in (torch.float32, torch.float64):
        assert on_ranks(4, _bits, TWO, 4, dtype) == [[True] * 4] * 4


def _rows(cases: list[Case], heads: tuple[int, int]) -> list[list[dict[str, float]]]:
    dtypes = torch.float64, torch.bfloat16
    return [[_errors(case, True, heads=heads, dtype=dtype)[1] for dtype in dtypes] for case in cases]


@pytest.mark.parametrize("heads", [(8, 8), (8, 2)])
def test_bytes_are_the_closed_forms(heads: tuple[int, int]) -> None:
    """Those of the papers: nothing else is sent, and gradients of keys travel in fp32 at least."""
    H, G = heads
    n, X, keys = 4, B * H * 8 * E, 2 * B * G * 8 * E  # elements of a rank, 8 tokens; K and V
    of_heads = (2 * X + 2 * B * max(G, n) * 8 * E) * (n - 1) // n
    forms = {
        "ring": {"context_ring": (n - 1) * keys, "context_ring_again": (n - 1) * keys},
        "gather": {"context_gather": (n - 1) * keys, "context_gather_again": (n - 1) * keys},
        "heads": {"context_heads": of_heads, "context_heads_grad": of_heads},
    }
    grads = {"ring": ("context_ring_grad", n * keys), "gather": ("context_scatter", (n - 1) * keys)}
    for of_rank in on_ranks(n, _rows, [({}, n, way) for way in forms], heads):
        for (way, form), found in zip(forms.items(), of_rank, strict=True):
            for sent, width, wide in zip(found, (8, 2), (8, 4), strict=True):
                expected = {row: elements * width for row, elements in form.items()}
                if way in grads:
                    expected[grads[way][0]] = grads[way][1] * wide
                assert sent == expected


def _each_slow(*ways: str | dict[str, str]) -> list[float]:
    return [_slow(each) for each in ways]


def _slow(ways: str | dict[str, str]) -> float:
    """Bytes that this rank's attention sends between nodes."""
    context = lowband.Context(_topology((("node", 2),), 4), ways)
    mine = [context.split(x, 2).requires_grad_() for x in _whole(8, 8, 32, torch.float64)[:3]]
    context.attention(*mine).sum().backward()
    return sum(sent.bytes for sent in context.ledger.take() if sent.level == "world")


def test_heads_inside_send_less_between_nodes() -> None:
    """A ring over nodes alone makes 1 hop instead of 3, and 2 instead of 4 for gradients."""
    ways = "ring", {"node": "heads", "world": "ring"}, {"node": "gather", "world": "ring"}
    flat, mixed, near = map(sum, zip(*on_ranks(4, _each_slow, *ways), strict=True))
    block = 2 * B * 8 * 8 * E * 8  # bytes of a rank's keys and values
    assert flat == 2 * block * (3 + 3 + 4)  # two of four ranks have a successor on another node
    assert mixed == near == 4 * block * (1 + 1 + 2)


def _one_token(context_ranks: int) -> list[float]:
    """Errors of gradients, with one token that counts, each in turn; then with all but one rank's masked."""
    topology = _topology((), context_ranks)
    context = lowband.Context(topology)
    torch.manual_seed(0)
    x, weight = torch.randn(1, 8, 16, dtype=torch.float64), torch.randn(24, 8, dtype=torch.float64)
    targets = torch.randint(24, (1, 16))
    masks = [torch.arange(16) != i for i in range(16)]
    for rank in range(context_ranks):  # all but one rank's tokens are masked
        own = torch.tensor(context.layout.positions(rank, 16))
        masks.append(~torch.isin(torch.arange(16), own))
    errors = []
    for mask in masks:
        own, whole = (weight.clone().requires_grad_() for _ in range(2))
        labels = targets.masked_fill(mask, -100)
        F.cross_entropy(x.transpose(1, 2).flatten(0, 1) @ whole.T, labels.flatten()).backward()
        mine = context.split(x.transpose(1, 2)).flatten(0, 1) @ own.T
        part = context.split(labels, fill=-100)
        total = F.cross_entropy(mine, part.flatten(), reduction="sum")
        context.mean(total, part != -100).backward()
        assert own.grad is not None
        torch.distributed.all_reduce(own.grad)
        errors.append((own.grad / context_ranks - whole.grad).abs().max().item())
    return errors


def test_loss_divides_by_all_tokens_that_count() -> None:
    assert max(max(errors) for errors in on_ranks(4, _one_token, 4)) < 1e-14


def test_none_counts_gives_zero() -> None:
    assert on_ranks(2, _nothing_counts) == [0.0, 0.0]


def _nothing_counts() -> float:
    context = lowband.Context(_topology((), 2))
    return context.mean(torch.tensor(0.0), torch.zeros(4, dtype=torch.bool)).item()


def _split() -> list[list[int]]:
    context = lowband.Context(_topology((("node", 2),), 4), {"node": "heads", "world": "ring"})
    tokens, labels = torch.arange(14).view(1, 14), torch.arange(1, 15).view(1, 14)
    return [x[0].tolist() for x in (context.split(tokens), context.split(labels, fill=-100))]


def test_labels_go_with_their_tokens() -> None:
    """Shifted before: the last token of a piece has the first of the next as its label. 14 + 2 tokens."""
    found = on_ranks(4, _split)
    assert [tokens for tokens, _ in found] == [[0, 1, 2, 3], [12, 13, 0, 0], [4, 5, 6, 7], [8, 9, 10, 11]]
    for tokens, labels in found:
        real = [token for token, label in zip(tokens, labels, strict=True) if label != -100]
        assert [label for label in labels if label != -100] == [token + 1 for token in real]
    assert sum(label == -100 for _, labels in found for label in labels) == 2


def test_zigzag_balances_a_causal_mask() -> None:
    """Pairs of a query and a key of each of 4 ranks: equal, and about 1 : 3 : 5 : 7 without."""
    levels = Levels.fit({}, 4)

    def pairs(zigzag: bool) -> list[int]:
        layout = Layout(levels, {"world": "ring"}, zigzag)
        return [sum(position + 1 for position in layout.positions(place, 64)) for place in range(4)]

    assert len(set(pairs(True))) == 1
    steps = [b - a for a, b in pairwise(pairs(False))]
    assert set(steps) == {256}  # 16 queries see 16 keys more


REFUSED = [
    ({"world": "heads"}, (3, 3), 8, {}, "3 heads with 3 of keys cannot be divided over 2 ranks"),
    ("ring", (4, 4), 7, {}, "7 tokens on a rank (allowed: multiples of 2, as split gives)"),
    ("ring", (4, 3), 8, {}, "with H a multiple of G"),
    ("ring", (4, 4), 8, {"causal": False}, "of an unknown number"),
    ("ring", (4, 4), 8, {"causal": False, "tokens": 9}, "of 9"),
    ("flash", (4, 4), 8, {}, "unknown way 'flash' (allowed: heads, gather, ring, state)"),
    ("ring", (4, 4), 8, {"kernel": "flash3"}, "unknown kernel 'flash3' (allowed: sdpa, flash2)"),
    ("ring", (4, 4), 8, {"kernel": "flash2"}, "needs Triton and a CUDA or ROCm device, not cpu"),
    ({"rack": "ring"}, (4, 4), 8, {}, "no level 'rack'"),
    ({}, (4, 4), 8, {}, "no way for level 'world'"),
]


def _refused(cases: list) -> list[str]:
    found = []
    for ways, (heads, groups), tokens, more, _ in cases:
        with pytest.raises(UserError) as error:
            context = lowband.Context(_topology((), 2), ways)
            context.attention(*(torch.zeros(1, n, tokens, E) for n in (heads, groups, groups)), **more)
        found.append(str(error.value))
    with pytest.raises(UserError) as error:
        lowband.Context(_topology((), 2)).split(torch.zeros(1, 1))
    found.append(str(error.value))
    with pytest.raises(UserError) as error:
        lowband.Context(_topology((), 2)).bind(torch.nn.Sequential(torch.nn.Conv1d(4, 4, 3)))
    found.append(str(error.value))
    layers = torch.nn.Sequential(torch.nn.Linear(4, 4))
    with pytest.raises(UserError) as error:
        lowband.shard(layers, lowband.Scheme.parse(SELDOM, ""), _topology((("node", 1),), 2), torch.nn.Linear)
    return [*found, str(error.value)]


SELDOM = {
    "name": "seldom", "weights": "self", "grads": "self", "optim": "self",
    "sync": {"every": 2, "beyond": "node"},
}  # fmt: skip


def test_what_cannot_be_is_refused_in_a_line() -> None:
    expected = [line for *_, line in REFUSED]
    expected += ["1 tokens are too few for 2 ranks", "Conv1d needs the tokens of a whole sequence, in order"]
    for found in on_ranks(2, _refused, REFUSED):
        for message, line in zip(found, [*expected, "context 2 crosses replicas"], strict=True):
            assert line in message
            assert "\n" not in message


def test_order_of_ways() -> None:
    levels = Levels.fit(TWO, 4)
    assert ways_of("node=heads, world=ring", levels) == {"node": "heads", "world": "ring"}
    assert ways_of("gather", levels) == {"node": "gather", "world": "gather"}
    with pytest.raises(UserError, match="ring on 'node' lies inside of heads on 'world'"):
        ways_of({"node": "ring", "world": "heads"}, levels)
