"""Breadth-first accumulation of a GPT: the values of one process, bit for bit; bytes sent and held."""

from functools import cache

import pytest
import torch
import torch.distributed as dist
from test_parity import CLIP, EXACT, INNER, QUANTIZED, SPEC, TOKENS, optimizer_of, train_reference

import lowband
from lowband.cost.bytes import sent_bytes
from lowband.cost.memory import state_bytes
from lowband.engine.passes.engine import engine_of
from lowband.model.data import batch
from lowband.model.gpt import GPT, Block
from lowband.run.on_ranks import on_ranks
from lowband.spec.mesh import SELF, Levels
from lowband.spec.records import by_row
from lowband.spec.tiers import at
from tests.checkout import CONFIG

UNTIED = SPEC.model_copy(update={"tied_head": False})
STEPS = 2  # the second gathers the new weights
DTYPE = {"fp32": torch.float32, "bf16": torch.bfloat16}
Trained = tuple[list[float], list[float], dict[str, torch.Tensor]]  # losses, gradient norms, final weights


def part(step: int, micro: int, rank: int, ranks: int, accumulation: int) -> tuple[torch.Tensor, ...]:
    """One sequence of a global batch that is ordered as the training loop orders it."""
    found = batch(TOKENS, 5, step, micro * ranks + rank, 1, ranks * accumulation, SPEC.seq_len)
    return tuple(torch.from_numpy(each) for each in found)


def train(
    scheme: str,
    accumulation: int,
    order: str = "breadth",
    dtype: str = "fp32",
    tied: bool = False,
    recompute: str = "none",
) -> tuple[Trained, bool]:
    """What training gives, and whether the bytes sent and held are those of the closed forms."""
    topology, placed = lowband.Topology(INNER), CONFIG.scheme(scheme)
    model = GPT(SPEC if tied else UNTIED, seed=7, recompute=recompute)  # type: ignore[arg-type]
    lowband.shard(model, placed, topology, Block, DTYPE[dtype])
    engine, optimizer = engine_of(model), optimizer_of(model.parameters())
    rank, ranks = dist.get_rank(), dist.get_world_size()
    losses, norms = [], []
    for step in range(STEPS):
        engine.ledger.take()
        parts = [part(step, micro, rank, ranks, accumulation) for micro in range(accumulation)]
        if order == "breadth":
            found = lowband.accumulate(model, parts, lambda each: model(*each) / accumulation)
        else:
            found = depth_first(model, parts)
        norms.append(float(lowband.clip_grad_norm_(model, CLIP)))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(sum(loss.item() for loss in found))
    sent = by_row(engine.ledger.take())
    units = [unit.layout.numel for unit in engine.units]
    levels, by = topology.levels, (dtype, "fp32", accumulation)
    optim = at("optim", placed.optim_tier)
    held = {**engine.meter.peak, optim: 3 * engine.meter.peak[optim]}
    states = state_bytes(units, placed, levels, *by, "gloo", order=order)  # type: ignore[arg-type]
    is_closed_form = sent == sent_bytes(units, placed, levels, *by, True, order=order) and states == {  # type: ignore[arg-type]
        kind: held.get(kind, 0) for kind in states
    }
    return (losses, norms, lowband.full_state_dict(model)), is_closed_form


def depth_first(model: GPT, parts) -> list[torch.Tensor]:
    losses = []
    for i, each in enumerate(parts):
        engine_of(model).sync = i == len(parts) - 1
        loss = model(*each) / len(parts)
        loss.backward()
        losses.append(loss.detach())
    return losses


def train_all(cases) -> list[tuple[Trained, bool]]:
    return [train(*case) for case in cases]


def train_references(ranks: int, accumulations: tuple[int, ...]) -> dict[int, Trained]:
    """Each rank sums its micro-batches before anything is reduced: the order of a scheme that keeps gradients
    on one rank."""
    scheme, levels = CONFIG.scheme("zero3").model_copy(update={"grads": SELF}), Levels.fit(INNER, ranks)
    return {n: train_reference(scheme, levels, STEPS, n, UNTIED, part) for n in accumulations}


@cache
def single(ranks: int) -> dict[int, Trained]:
    return on_ranks(1, train_references, ranks, (1, 2, 3, 4))[0]


CASES = [
    (1, [("zero3", 3), ("ddp", 1)]),
    (2, [(scheme, 1 + i % 4) for i, scheme in enumerate(EXACT)]),
    (4, [("zero3", 3), ("hier3-exact", 2)]),
    pytest.param(4, [(scheme, 2 + i % 2) for i, scheme in enumerate(EXACT)], marks=pytest.mark.wide),
    pytest.param(8, [("zero3", 4), ("hier3-exact", 3), ("zero1", 2)], marks=pytest.mark.wide),
]


@pytest.mark.parametrize(("ranks", "cases"), CASES)
def test_bit_equal_to_single_process(ranks: int, cases: list[tuple[str, int]]) -> None:
    results = on_ranks(ranks, train_all, cases)
    for i, (scheme, accumulation) in enumerate(cases):
        expected_losses, expected_norms, expected = single(ranks)[accumulation]
        (_, norms, weights), _ = results[0][i]
        losses = [sum(each) / ranks for each in zip(*(of[i][0][0] for of in results), strict=True)]
        assert losses == pytest.approx(expected_losses, rel=1e-6)
        assert norms == pytest.approx(expected_norms, rel=1e-12)
        assert all(torch.equal(weights[name], expected[name]) for name in expected), (scheme, accumulation)
        assert all(of[i][1] for of in results), (scheme, accumulation)


def test_quantized_schemes_stay_near() -> None:
    """And send and hold what the closed forms say. Bounds: see test_parity.py."""
    ranks = 4
    results = on_ranks(ranks, train_all, [(scheme, 2) for scheme in QUANTIZED])
    for i, scheme in enumerate(QUANTIZED):
        expected_losses, expected_norms, _ = single(ranks)[2]
        losses = [sum(each) / ranks for each in zip(*(of[i][0][0] for of in results), strict=True)]
        assert losses == pytest.approx(expected_losses, rel=2e-3)
        assert losses != pytest.approx(expected_losses, rel=1e-7)  # it did quantize
        assert results[0][i][0][1] == pytest.approx(expected_norms, rel=0.1)
        assert all(of[i][1] for of in results), scheme


def same(a: tuple[Trained, bool], b: tuple[Trained, bool]) -> bool:
    (losses, norms, weights), is_closed_form = a
    return (
        is_closed_form
        and b[1]
        and (losses, norms) == b[0][:2]
        and all(torch.equal(weights[name], value) for name, value in b[0][2].items())
    )


@pytest.mark.parametrize("ranks", [1, 4])
def test_one_micro_batch_is_that_of_depth_first(ranks: int) -> None:
    """Also with tied weights, on quantized wires and in bf16: the order of sums is the same."""
    schemes = ("hpz", "zeropp", "zero1")
    cases = [(s, 1, order, "bf16", True) for s in schemes for order in ("breadth", "depth")]
    for results in on_ranks(ranks, train_all, cases):
        for breadth, depth in zip(results[::2], results[1::2], strict=True):
            assert same(breadth, depth)


def test_one_rank_is_that_of_depth_first() -> None:
    """In bf16 too: both sum in fp32, in the order of micro-batches."""
    cases = [("zero3", 3, order, dtype) for dtype in DTYPE for order in ("breadth", "depth")]
    fp32, fp32_depth, bf16, bf16_depth = on_ranks(1, train_all, cases)[0]
    assert same(fp32, fp32_depth)
    assert same(bf16, bf16_depth)


def test_tied_weights_stay_near_depth_first() -> None:
    """The head's gradients of all micro-batches come before the embedding's: another order of sums."""
    cases = [("hier3-exact", 3, order, "fp32", True) for order in ("breadth", "depth")]
    breadth, depth = on_ranks(4, train_all, cases)[0]
    assert breadth[0][1] == pytest.approx(depth[0][1], rel=1e-6)
    for name, value in depth[0][2].items():
        assert torch.allclose(breadth[0][2][name], value, rtol=0, atol=3e-4), name  # 0.1 x learning rate


@pytest.mark.parametrize("ranks", [1, 4])
def test_recomputed_blocks_give_the_same_bits(ranks: int) -> None:
    cases = [("hpz", 2, "breadth", "bf16", False, recompute) for recompute in ("full", "none")]
    recomputed, kept = on_ranks(ranks, train_all, cases)[0]
    assert same(recomputed, kept)
