"""Every scheme without sync trains exactly as a single process does, on 1, 2, 4 and 8 ranks."""

from collections.abc import Iterator, Sequence
from functools import cache

import numpy as np
import pytest
import reference
import torch
import torch.distributed as dist
from named import INNER, SCHEMES, WITHOUT_SYNC, Topologies, levels_of

import lowband
from lowband.engine.passes.engine import engine_of
from lowband.model.data import batch
from lowband.model.gpt import GPT, Block
from lowband.run.on_ranks import on_ranks
from lowband.spec.mesh import Levels
from lowband.spec.model import ModelSpec
from lowband.spec.scheme import Scheme
from lowband.spec.step import Pattern
from tests.checkout import CONFIG

QUANTIZED = [name for name in SCHEMES if CONFIG.scheme(name).is_quantized]
EXACT = [name for name in SCHEMES if name not in QUANTIZED]
# Odd on purpose: nothing divides by 8, and several parameters are smaller than the group.
SPEC = ModelSpec(name="odd", layers=2, hidden=18, heads=3, vocab=53, seq_len=11, source="test")
STEPS, GLOBAL_BATCH, CLIP = 2, 16, 0.5  # the second step has the first one's weights and moments
TOKENS = np.random.default_rng(0).integers(0, SPEC.vocab, 500).astype(np.uint8)


def optimizer_of(parameters) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=3e-3, weight_decay=0.1)


def part_of_batch(step: int, micro: int, rank: int, ranks: int, accumulation: int):
    size = GLOBAL_BATCH // (ranks * accumulation)  # six ranks leave some sequences out
    first = (micro * ranks + rank) * size
    parts = batch(TOKENS, 5, step, first, size, GLOBAL_BATCH, SPEC.seq_len)
    return tuple(torch.from_numpy(part) for part in parts)


Case = tuple[str, int]  # scheme, accumulation
Trained = tuple[list[float], list[float], dict[str, torch.Tensor]]  # losses, gradient norms, final weights
ONCE, TWICE = (tuple((name, accumulation) for name in SCHEMES) for accumulation in (1, 2))


def stepped(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, steps: int, accumulation: int = 1
) -> Iterator[tuple[torch.Tensor, float]]:
    """Train a sharded model on this rank's part of the batches; of each step, its loss and gradient norm."""
    for step in range(steps):
        total = torch.zeros(())
        for micro in range(accumulation):
            engine_of(model).sync = micro == accumulation - 1
            arguments = part_of_batch(step, micro, dist.get_rank(), dist.get_world_size(), accumulation)
            loss = model(*arguments) / accumulation
            loss.backward()
            total += loss.detach()
        norm = float(lowband.clip_grad_norm_(model, CLIP))
        optimizer.step()
        optimizer.zero_grad()
        yield total, norm


def train_sharded(
    scheme_name: str, accumulation: int, topology: lowband.Topology, pattern: Pattern = "hops"
) -> Trained:
    scheme = CONFIG.scheme(scheme_name)
    model = lowband.shard(
        GPT(SPEC, seed=7), scheme, topology, Block, compute_dtype=torch.float32, collectives=pattern
    )
    optimizer = optimizer_of(model.parameters())
    losses, norms = [], []
    for total, norm in stepped(model, optimizer, STEPS, accumulation):
        norms.append(norm)
        dist.all_reduce(total)
        losses.append(total.item() / dist.get_world_size())
    return losses, norms, lowband.full_state_dict(model)


def train_all(cases: Sequence[Case], inner: dict[str, int]) -> dict[Case, Trained]:
    topologies = Topologies(inner)
    return {case: train_sharded(*case, topologies.of(case[0])) for case in cases}


@cache
def sharded(ranks: int, cases: Sequence[Case], **inner: int) -> dict[Case, Trained]:
    """Every case, in one process group."""
    return on_ranks(ranks, train_all, cases, inner or INNER, time_limit_s=400)[0]


def train_reference(
    scheme: Scheme,
    levels: Levels,
    steps: int,
    accumulation: int = 1,
    spec: ModelSpec = SPEC,
    part=part_of_batch,
) -> Trained:
    """The same by one process in plain torch, with the scheme's order of sums."""
    return reference.train(
        GPT(spec, seed=7), lambda model, *batch: model(*batch),
        lambda step, micro, rank: part(step, micro, rank, levels.world, accumulation),
        scheme, levels, steps, accumulation, CLIP, optimizer_of,
    )  # fmt: skip


def train_references(cases: Sequence[Case], ranks: int, inner: dict[str, int]) -> dict[Case, Trained]:
    """Of a scheme only the order of sums matters: one reference for each grads level."""
    by_order: dict[tuple[Levels, str, int], Trained] = {}  # levels, grads level, accumulation
    found: dict[Case, Trained] = {}
    for name, accumulation in cases:
        scheme = CONFIG.scheme(name)
        levels = Levels.fit(levels_of(name, inner), ranks)
        order = (levels, scheme.grads, accumulation)
        if order not in by_order:
            by_order[order] = train_reference(scheme, levels, STEPS, accumulation)
        found[name, accumulation] = by_order[order]
    return found


@cache
def single(ranks: int, cases: Sequence[Case], **inner: int) -> dict[Case, Trained]:
    """The same by one process, forked, so that the test process stays free of autograd."""
    return on_ranks(1, train_references, cases, ranks, inner or INNER, time_limit_s=400)[0]


@pytest.mark.parametrize("scheme", WITHOUT_SYNC)
def test_there_are_levels_to_try_it_on(scheme: str) -> None:
    """Tests of all schemes leave out one whose levels no machine has; this says so."""
    if not levels_of(scheme):
        lacking = ", ".join(sorted(CONFIG.scheme(scheme).machine_levels))
        pytest.skip(f"no machine in slurm/ has the levels of scheme '{scheme}': {lacking}")
    Levels.fit(levels_of(scheme), 8)


RANKS_AND_CASES = [(1, ONCE), (2, ONCE), (8, ONCE), (4, TWICE)]
RANKS_AND_CASES += [
    pytest.param(*case, marks=pytest.mark.wide) for case in ((4, ONCE), (1, TWICE), (2, TWICE), (8, TWICE))
]


@pytest.mark.parametrize(("ranks", "cases"), RANKS_AND_CASES)
@pytest.mark.parametrize("scheme", EXACT)
def test_bit_equal_to_single_process(scheme: str, ranks: int, cases: Sequence[Case]) -> None:
    [case] = [case for case in cases if case[0] == scheme]
    losses, norms, weights = sharded(ranks, cases)[case]
    expected_losses, expected_norms, expected_weights = single(ranks, cases)[case]
    # Losses are summed over ranks by gloo's all-reduce, in another order than the reference's.
    assert losses == pytest.approx(expected_losses, rel=1e-6)
    assert norms == pytest.approx(expected_norms, rel=1e-12)
    assert list(weights) == list(GPT(SPEC).state_dict())
    for name, expected in expected_weights.items():
        assert torch.equal(weights[name], expected), name


@pytest.mark.parametrize("scheme", ["zero3", "hpz", "hier3-exact"])
@pytest.mark.parametrize("inner", [{"package": 3, "node": 6}, {"package": 1, "node": 3}])
def test_bit_equal_on_six_ranks(scheme: str, inner: dict[str, int]) -> None:
    """Level sizes that are no powers of two, a level of one rank, a level as large as the world."""
    cases = (("zero3", 1), ("hpz", 1), ("hier3-exact", 1))
    _, _, weights = sharded(6, cases, **inner)[scheme, 1]
    _, _, expected = single(6, cases, **inner)[scheme, 1]
    for name in expected:
        assert torch.equal(weights[name], expected[name]), name


def train_in_one_backward() -> tuple[list[float], dict[str, torch.Tensor]]:
    """The global batch in one backward pass: plain torch, without the reference's order of sums."""
    model = GPT(SPEC, seed=7)
    optimizer = optimizer_of(model.parameters())
    losses = []
    for step in range(STEPS):
        loss = model(*part_of_batch(step, 0, 0, 1, 1))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, {name: p.detach() for name, p in model.named_parameters()}


@cache
def in_one_backward() -> tuple[list[float], dict[str, torch.Tensor]]:
    return on_ranks(1, train_in_one_backward)[0]


@pytest.mark.parametrize("scheme", EXACT)
def test_close_to_one_backward_of_the_global_batch(scheme: str) -> None:
    """The sums' order differs inside the matrix products, so only a bound holds: fp32 rounds to 6e-8, the
    gradients differ by about 1e-7 of their size, and Adam's first steps (which divide by their size) turn
    that into a like share of the learning rate where a gradient is not close to zero."""
    losses, _, weights = sharded(8, ONCE)[scheme, 1]
    expected_losses, expected = in_one_backward()
    assert losses == pytest.approx(expected_losses, rel=1e-5)
    for name in expected:
        assert torch.allclose(weights[name], expected[name], rtol=0, atol=3e-4), name  # 0.1 x learning rate


@pytest.mark.parametrize("ranks", [2, 8])
@pytest.mark.parametrize("scheme", QUANTIZED)
def test_quantized_schemes_stay_near(scheme: str, ranks: int) -> None:
    """INT8 weights are off by up to 1/254 of their block's largest, INT4 gradients by up to 1/14: the loss of
    each of the first steps moves by far less than a percent. test_wires.py holds every hop to its bits."""
    losses, norms, _ = sharded(ranks, ONCE)[scheme, 1]
    expected_losses, expected_norms, _ = single(ranks, ONCE)[scheme, 1]
    assert losses == pytest.approx(expected_losses, rel=2e-3)
    assert losses != pytest.approx(expected_losses, rel=1e-7)  # it did quantize
    assert norms == pytest.approx(expected_norms, rel=0.1)


def test_quantized_schemes_are_exact_on_one_rank() -> None:
    """Nothing is sent, so nothing is quantized."""
    for scheme in QUANTIZED:
        _, _, weights = sharded(1, ONCE)[scheme, 1]
        _, _, expected = single(1, ONCE)[scheme, 1]
        assert all(torch.equal(weights[name], expected[name]) for name in expected)


def test_quantization_does_not_depend_on_placement() -> None:
    """zeropp and hier3 send on the same wires from shards of different sizes. Blocks never mix parameters and
    start where parameters do, so both train to the same bits."""
    zeropp, hier3 = (sharded(8, ONCE)[scheme, 1] for scheme in ("zeropp", "hier3"))
    assert zeropp[0] == hier3[0]
    assert all(torch.equal(zeropp[2][name], hier3[2][name]) for name in zeropp[2])


def test_accumulation_tells_zeropp_and_hier3_apart() -> None:
    """With two passes a step zeropp quantizes each pass between nodes, and hier3 their sum, once."""
    cases = (("zeropp", 2), ("hier3", 2))
    zeropp, hier3 = (sharded(8, cases)[case] for case in cases)
    assert any(not torch.equal(zeropp[2][name], hier3[2][name]) for name in zeropp[2])
