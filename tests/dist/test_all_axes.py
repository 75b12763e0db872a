"""Every pair of an axis, a scheme, a schedule and what else a job has, against one process of plain torch.

For every step: the loss and each parameter's gradient in fp64 within 1e-12; the clipped gradients, the norm
and the new weights within what fp32 shards hold; and the bytes of every row as its closed form. The second
step begins with the weights that the ranks have, so that it finds what was left from the first one.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import combinations, product

import pytest
import torch
from composed import EMBED, HEAD, LR, ROWS, STEPS, Job, Place, Step, drawn, possible, reference, trained
from composed_bytes import expected_bytes

from lowband.run.on_ranks import on_ranks
from tests.pairwise import Case, covering, pairs

CLIP, FP64, FP32 = 0.1, 1e-12, 2e-6
DRAWN = drawn(600)


def is_quick(case: Case) -> bool:
    """On few ranks, with few micro-batches, and along pipeline where the schedule is one of a pipeline."""
    job = Job.of(case)
    values, has_stages = job.values, job.values["pipeline"] > 1
    if has_stages == (values["schedule"] in ("none", "depth")) or (
        has_stages and values["micro_batches"] == 1
    ):
        return False
    return job.ranks <= 4 and values["accumulation"] * values["micro_batches"] <= 4


QUICK = covering([case for case in possible() if is_quick(case)], size=1)  # each value of each row
CASES = sorted(covering(DRAWN) | QUICK, key=lambda case: (Job.of(case).ranks, str(case)))
Grads = Mapping[str, torch.Tensor]


def test_the_cases_hold_all_pairs_and_the_quick_ones_all_values() -> None:
    met = set()
    for (i, some), (j, others) in combinations(enumerate(zip(*possible(), strict=True)), 2):
        met |= {((i, x), (j, y)) for x, y in set(zip(some, others, strict=True))}
    assert set().union(*map(pairs, CASES)) == met
    assert [set(values) for values in zip(*QUICK, strict=True)] == [set(row) for row in ROWS.values()]


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, marks=[] if case in QUICK else pytest.mark.wide, id="-".join(map(str, case)))
        for case in CASES
    ],
)
def test_any_composition_trains_as_one_process(case: Case) -> None:
    check_job(Job.of(case))


@pytest.mark.parametrize(
    "case",
    [
        (1, False, 1, 2, 1, "merged", 2, "1f1b", "zero3", 1, 3),
        (2, False, 1, 1, 1, "merged", 2, "zb-h1", "ddp", 2, 3),
        pytest.param(
            (2, True, 1, 2, 1, "merged", 2, "interleaved", "hier3-exact", 1, 3), marks=pytest.mark.wide
        ),
        pytest.param((2, False, 1, 2, 1, "merged", 2, "1f1b", "zero3", 1, 3), marks=pytest.mark.wide),
        pytest.param((2, False, 1, 2, 1, "merged", 2, "zb-h1", "ddp", 2, 3), marks=pytest.mark.wide),
        pytest.param((2, True, 1, 4, 1, "merged", 2, "1f1b", "hier3-exact", 2, 4), marks=pytest.mark.wide),
        pytest.param((2, True, 2, 1, 1, "merged", 4, "gpipe", "zero3", 2, 3), marks=pytest.mark.wide),
        pytest.param((1, False, 2, 2, 1, "merged", 2, "breadth", "hpz", 2, 1), marks=pytest.mark.wide),
    ],
    ids=lambda case: "-".join(map(str, case)),
)
def test_a_head_that_is_the_embedding_trains_as_in_one_process(case: Case) -> None:
    """On the first and the last rank along pipeline, cut along tensor and sharded along data."""
    check_job(Job({**Job.of(case).values, "tied": True}))


def check_job(job: Job) -> None:
    places, steps, last = zip(*on_ranks(job.ranks, trained, job, CLIP, time_limit_s=400), strict=True)
    weights = [whole([of_rank[step].weights for of_rank in steps]) for step in range(STEPS)]
    weights.append(whole(last))
    expected = on_ranks(1, references, job, weights[:STEPS])[0]
    for step, (loss, grads) in enumerate(expected):
        found = [of_rank[step] for of_rank in steps]
        assert not job.is_tied or torch.equal(weights[step][EMBED], weights[step][HEAD])
        assert sum(one.loss for one in found) / job.axes.tensor == pytest.approx(loss, rel=FP64)
        norm = sum(float(grad.square().sum()) for grad in grads.values()) ** 0.5
        assert norm > 2 * CLIP
        assert {one.norm for one in found} == {found[0].norm}
        assert found[0].norm == pytest.approx(norm, rel=FP32)
        for name, grad in grads.items():
            check_gradient(name, grad, job, places, found)
            check_clipped(name, grad * (CLIP / norm), job, places, found)
            new = weights[step][name] - (LR * CLIP / norm * grad).float()
            torch.testing.assert_close(weights[step + 1][name], new, rtol=FP32, atol=FP32)
        assert sent(found) == expected_bytes(job, step)


def references(job: Job, weights: Sequence[Grads]) -> list[tuple[float, dict[str, torch.Tensor]]]:
    return [reference(step, job, of_step) for step, of_step in enumerate(weights)]


def whole(states: Sequence[Grads]) -> dict[str, torch.Tensor]:
    """The job's weights; each is on one of the ranks."""
    assert sum(map(len, states)) == len({name for state in states for name in state})
    return {name: value for state in states for name, value in state.items()}


def check_gradient(
    name: str, expected: torch.Tensor, job: Job, places: Sequence[Place], steps: Sequence[Step]
) -> None:
    """What ranks computed in fp64 adds up: over data, and over tensor if they are partial sums."""
    for of_rank in slices(name, job, places):
        mine = [
            step.grads[name]
            for place, step in zip(places, steps, strict=True)
            if name in step.grads and has_slice(place, of_rank, name)
        ]
        of = of_rank.slice_of(name)
        error = (sum(mine) / job.along_data - (expected if of is None else of.cut(expected))).abs().max()
        assert float(error) < FP64 * float(expected.abs().max()), name


def slices(name: str, job: Job, places: Sequence[Place]) -> list[Place]:
    """Places with all parts of a parameter; of one that expert does not cut, along tensor alone."""
    of = places[0].slices.get(name)
    experts = job.axes.expert if of is not None and of.axis == "expert" else 1
    grid = product(range(job.axes.tensor), range(experts))
    return [places[0]._replace(tensor=tensor, expert=expert) for tensor, expert in grid]


def has_slice(place: Place, of: Place, name: str) -> bool:
    """Whether a rank's gradients are of the same slice, and a term of its sum."""
    cut = place.slices.get(name)
    same = cut is None or cut.axis == "tensor" or place.expert == of.expert
    return same and (place.tensor == of.tensor or name in place.partial)


def check_clipped(
    name: str, expected: torch.Tensor, job: Job, places: Sequence[Place], steps: Sequence[Step]
) -> None:
    """What optimizers have are parts of it, of which nothing is missing."""
    for of_rank in slices(name, job, places):
        of = of_rank.slice_of(name)
        slice_ = (expected if of is None else of.cut(expected)).flatten()
        held: dict[tuple[int, int], torch.Tensor] = {}
        for place, step in zip(places, steps, strict=True):
            if place.tensor == of_rank.tensor and has_slice(place, of_rank, name) and name in step.clipped:
                first, last, values = step.clipped[name]
                assert torch.equal(held.setdefault((first, last), values), values), name
        assert sum(last - first for first, last in held) == slice_.numel()
        for (first, last), values in held.items():
            error = (values - slice_[first:last]).abs().max()
            assert float(error) < FP32 * float(expected.abs().max()), name


def sent(steps: Sequence[Step]) -> Counter[tuple[str, str]]:
    """By row and level, of all ranks; of stages by row. What tokens choose is test_dispatch's."""
    found: Counter[tuple[str, str]] = Counter()
    for step in steps:
        for (row, level), count in step.sent.items():
            if row.startswith("route"):
                continue
            found[row, "" if row.startswith(("stage", "tied")) else level] += count
    return +found


def final(job: Job) -> dict[str, torch.Tensor]:
    return trained(job, CLIP)[2]


SAME = (  # pipeline, schedule, scheme; with two ranks along data
    (1, "depth", "zero3"),
    (2, "1f1b", "zero1"),
    (2, "zb-v", "ddp"),
    (2, "interleaved", "hpz"),
    (1, "breadth", "hsdp"),
    (2, "zb-h1", "zero2"),
    (2, "dualpipe-v", "hier3-exact"),
)


@pytest.mark.parametrize(
    ("tensor", "sequence_parallel", "places"),
    [
        (1, False, [SAME[0], SAME[4]]),
        pytest.param(2, True, SAME, marks=pytest.mark.wide),
        pytest.param(2, False, SAME, marks=pytest.mark.wide),
        pytest.param(1, False, SAME, marks=pytest.mark.wide),
    ],
)
def test_schemes_and_schedules_have_the_same_bits(
    tensor: int, sequence_parallel: bool, places: Sequence[tuple[int, str, str]]
) -> None:
    """At one tensor degree, and with as many ranks along data. The usual loop has another order of sums."""
    states = []
    for place in places:
        job = Job.of((tensor, sequence_parallel, 1, 2, 1, "merged", *place, 1, 3))
        states.append(whole(on_ranks(job.ranks, final, job, time_limit_s=300)))
    for state in states[1:]:
        assert state.keys() == states[0].keys()
        assert [name for name in state if not torch.equal(state[name], states[0][name])] == []
