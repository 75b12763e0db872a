"""Rows that padding adds and capacity drops, counted pair by pair; and that all ways compute the same."""

from collections import Counter
from math import ceil

import pytest
import torch

from lowband.run import padded_experts
from lowband.run.padded_experts import CAPACITIES, SKEWS, TOKENS, WAYS, chosen, computed, count


@pytest.mark.parametrize(("experts", "top_k"), padded_experts.SHAPES)
@pytest.mark.parametrize("skew", SKEWS)
def test_rows_are_counted_pair_by_pair(experts: int, top_k: int, skew: float) -> None:
    found = {row.way: row for row in count(experts, top_k, skew)}
    assert [*found] == [*WAYS]
    pairs = chosen(experts, top_k, skew).tolist()
    fullest = max(Counter(pairs).values())
    mean = TOKENS * top_k / experts
    for way, row in found.items():
        most = {"padded": fullest} | {f"capacity {c:g}": ceil(c * mean) for c in CAPACITIES}
        places, dropped = Counter[int](), 0
        for expert in pairs:
            if way in most and places[expert] == most[way]:
                dropped += 1
            else:
                places[expert] += 1
        rows = experts * most[way] if way in most else len(pairs)
        assert row[3:] == (way, len(pairs), rows, rows - sum(places.values()), dropped)
    for dropless in ("grouped", "loop"):
        assert found[dropless][5:] == (TOKENS * top_k, 0, 0)
    assert found["padded"].dropped == 0


def test_each_token_chooses_an_expert_once_and_popular_ones_more() -> None:
    pairs = chosen(8, 2, 1.5).view(-1, 2)
    assert (pairs[:, 0] != pairs[:, 1]).all()
    counts = [torch.bincount(chosen(64, 1, skew), minlength=64).max().item() for skew in SKEWS]
    assert counts == sorted(counts)


@pytest.mark.parametrize("way", WAYS)
def test_all_ways_compute_the_same_of_pairs_that_are_kept(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(padded_experts, "TOKENS", 24)
    torch.manual_seed(1)
    counts, top_k = torch.tensor([9, 0, 2, 13]), 1
    leaves = [torch.randn(*shape).requires_grad_() for shape in ((24, 16), (4, 8, 16), (4, 16, 8))]
    grad = torch.randn(24, 16)
    out = computed(way, leaves[0], counts, top_k, *leaves[1:])
    out.backward(grad)
    most = {"capacity 1": 6, "capacity 1.25": 8, "capacity 1.5": 9, "capacity 2": 12}.get(way, 24)
    others = [leaf.detach().clone().requires_grad_() for leaf in leaves]
    x, up, down = others
    kept, expected, begin = torch.zeros(24, dtype=torch.bool), torch.zeros(24, 16), 0
    for expert, n in enumerate(counts.tolist()):
        end = begin + min(n, most)
        kept[begin:end] = True
        expected[begin:end] = torch.nn.functional.silu(x[begin:end] @ up[expert].T) @ down[expert].T
        begin += n
    expected.backward(grad)
    torch.testing.assert_close(out, expected)
    assert (out[~kept] == 0).all()
    for leaf, other in zip(leaves, others, strict=True):
        torch.testing.assert_close(leaf.grad, other.grad)


def test_rows_of_times(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every way as often, in turns; the first turn is not among them."""
    for name, value in (("TOKENS", 32), ("HIDDEN", 8), ("WIDTH", 8), ("REPEATS", 2), ("SKEWS", (1.0,))):
        monkeypatch.setattr(padded_experts, name, value)
    counted, timed = padded_experts.measure()
    assert len(counted) == len(padded_experts.SHAPES) * len(WAYS)
    of = [(row.experts, row.repeat, row.way) for row in timed]
    assert of == [(e, turn, way) for e, _ in padded_experts.SHAPES for turn in (1, 2) for way in WAYS]
    assert all(row.took_s > 0 for row in timed)
