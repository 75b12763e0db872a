"""Attention over ranks along context, against one process that has the whole sequence."""

from functools import cache

import pytest
import torch
import torch.nn.functional as F

import lowband
from lowband.run.on_ranks import on_ranks

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
    packed: bool = False,
) -> tuple[float, dict[str, float]]:
    """The largest relative error of outputs and gradients; bytes by row."""
    inner, ranks, ways = case
    context = lowband.Context(_topology(tuple(inner.items()), ranks), ways, zigzag)
    *qkv, g = _whole(*heads, tokens, dtype)
    documents = torch.randint(3, (B, tokens)).sort(dim=1).values if packed else None
    theirs = [x.clone().requires_grad_() for x in qkv]
    expected = _expected(*theirs, causal, documents)
    expected.backward(g)
    mine = [context.split(x, 2).requires_grad_() for x in qkv]
    own = None if documents is None else context.split(documents, fill=-1)
    found = context.attention(*mine, causal=causal, documents=own, tokens=tokens)
    found.backward(context.split(g, 2))
    real = context.positions(tokens) < tokens
    pairs = [(found, expected), *((a.grad, b.grad) for a, b in zip(mine, theirs, strict=True))]
    errors = [
        ((a - context.split(b, 2))[:, :, real].abs().max() / b.abs().max()).item() for a, b in pairs
    ]
    return max(errors), {sent.collective: sent.bytes for sent in context.ledger.take()}


def _all(cases: list[dict]) -> list[float]:
    return [_errors(**case)[0] for case in cases]


TWO = {"node": 2}
RANKS: list[Case] = [
    ({}, 1, "ring"), ({}, 2, "ring"), ({}, 2, "gather"), ({}, 2, "heads"),
    (TWO, 4, "ring"), (TWO, 4, "gather"), (TWO, 4, "heads"),
    (TWO, 4, {"node": "heads", "world": "ring"}), (TWO, 4, {"node": "heads", "world": "gather"}),
    (TWO, 4, {"node": "gather", "world": "ring"}),
]  # fmt: skip


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_each_way_is_exact(ranks: int) -> None:
    cases = [
        {"case": case, "zigzag": zigzag, **more}
        for case in RANKS
        for zigzag in (False, True)
        for more in (
            {}, {"causal": False}, {"heads": (8, 4)}, {"tokens": 27}, {"tokens": 27, "causal": False},
            {"packed": True}, {"packed": True, "tokens": 29, "causal": False},
        )
        if case[1] == ranks
    ]  # fmt: skip
    found = on_ranks(ranks, _all, cases)
    for errors in found:
        for case, error in zip(cases, errors, strict=True):
            assert error < 1e-12, case
