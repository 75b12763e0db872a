"""What a search leaves out by: below every step, near it, and nothing that is shown."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from itertools import product
from random import Random

import numpy as np
import pytest

from lowband.cost.numbers import GIB
from lowband.predict.footprint import kept, memory_items, most_held, of_passes, peak_bytes
from lowband.predict.place import places
from lowband.predict.request import setting
from lowband.predict.search.bounded import Search
from lowband.predict.search.candidates import MODEL_ERROR, differ_in_one
from lowband.predict.search.choice import chosen
from lowband.predict.search.degrees import axes_to_try, possible
from lowband.predict.search.floors import Bounds, floor
from lowband.predict.search.peaks import Peaks, capacity
from lowband.predict.search.placements import table
from lowband.predict.search.plan import RECOMPUTE, _bases, plan
from lowband.predict.search.relief import HOST
from lowband.predict.search.software import of_stack
from lowband.predict.tiers import short_by
from lowband.predict.time import step_time
from lowband.predict.workload import Workload
from lowband.spec.model import ModelSpec
from lowband.spec.schedule import owed, peak
from lowband.spec.schedules import SCHEDULES, Name, lists
from lowband.spec.stack import OURS, Stack
from lowband.spec.stages import summing
from lowband.spec.step import Schedule
from tests.checkout import CONFIG

CASES = [
    ("frontier", "llama-3-405b", 4096, 131072),
    ("dgx-h100", "gpt-20b", 64, 2048),
    ("dgx-h100", "qwen3-30b-a3b", 64, 4096),
    ("dgx-h100", "deepseek-v3", 256, 4096),
]


def bases(cluster: str, model: str, ranks: int, seq: int, count: int):
    """So many jobs of a search, evenly drawn."""
    machine, stack = setting(CONFIG, cluster, None)
    spec = CONFIG.model(model)
    axes = axes_to_try(machine, spec, context=None, expert=None, seq_len=seq)
    tried = possible(machine, spec, ranks, axes, seq, ("all",), ())
    some = tried[:: max(1, len(tried) // count)]
    return [*_bases(machine, stack, spec, ranks, seq, 4 * ranks, some, None, RECOMPUTE)]


@pytest.mark.parametrize(("case", "nearest"), [*zip(CASES, (0.98, 0.95, 0.85, 0.85), strict=True)])
def test_bounds_are_below_floors_and_near(case: tuple[str, str, int, int], nearest: float) -> None:
    bounds = Bounds()
    ratios = [float((bounds.of(base).least / floor(base).least).max()) for base in bases(*case, count=20)]
    assert max(ratios) <= 1
    assert sorted(ratios)[len(ratios) // 2] > nearest


@pytest.mark.parametrize("case", CASES)
def test_no_step_takes_less_than_its_floor_and_what_is_exposed(case: tuple[str, str, int, int]) -> None:
    """By the bound and by the floor, under any scheme, and near what a step takes."""
    drawn, search, bounds, ratios = Random(39), Search(False, (), MODEL_ERROR), Bounds(), []
    of_all = bases(*case, count=20)
    for whole in drawn.sample(of_all, 8):
        i = drawn.randrange(np.size(whole.micro_batch))
        base = replace(
            whole, micro_batch=whole.micro_batch[i : i + 1], accumulation=whole.accumulation[i : i + 1]
        )
        of_base = table(base, (), exact=False)
        bound, least = (search._near(base, of_base, one)[0][:, 0] for one in (bounds.of(base), floor(base)))
        assert np.all(bound <= least * (1 + 1e-12))
        for j in drawn.sample(range(len(of_base.schemes)), 5):
            step = float(step_time(base.varied(scheme=of_base.schemes[j])).total[0])
            ratios.append(least[j] / step)
    assert max(ratios) <= 1
    assert sorted(ratios)[len(ratios) // 2] > 0.6


@dataclass(frozen=True)
class Small:
    """A small job of our engine. slow: by how much each level's link is slower than Frontier's"""

    layers: int
    tp: int
    pp: int
    schedule: Schedule
    chunks: int = 1
    given: tuple[int, ...] = ()
    vocab: int = 512
    tied: bool = False
    slow: Mapping[str, float] = field(default_factory=dict)
    ranks: int = 8
    batch: int = 128

    def bases(self, stack: Stack) -> list[Workload]:
        """With every micro-batch and kind of recomputation."""
        machine, _ = setting(CONFIG, "frontier", "ours")
        links = {one.name: one.link for one in machine.levels if one.link is not None}
        slower = {
            name: link.model_copy(update={"gigabytes_per_s": link.gigabytes_per_s / self.slow.get(name, 1)})
            for name, link in links.items()
        }
        levels = tuple(one.model_copy(update={"link": slower.get(one.name)}) for one in machine.levels)
        model = ModelSpec(
            name="small", layers=self.layers, hidden=256, heads=4, vocab=self.vocab, seq_len=512,
            tied_head=self.tied, source="none",
        )  # fmt: skip
        machine = machine.model_copy(update={"levels": levels})
        axes = axes_to_try(machine, model, [self.tp], [self.pp], self.given)
        tried = [
            one for one in possible(machine, model, self.ranks, axes, 512, ("all",), ())
            if (one.schedule, one.chunks) == (self.schedule, self.chunks)
        ]  # fmt: skip
        found = _bases(machine, stack, model, self.ranks, 512, self.batch, tried, None, RECOMPUTE)
        assert tried
        return [*found]


SMALL = {
    "the last stage is the short one": Small(3, 4, 2, "1f1b"),
    "a middle stage is the long one": Small(8, 1, 4, "1f1b", given=(1, 1, 5, 1)),
    "one rank has more states, and another more activations": Small(7, 1, 2, "1f1b", given=(3, 4)),
    "and of split backwards": Small(17, 2, 2, "zb-h2", given=(9, 8)),
    "a stage of interleaved ones is short": Small(10, 2, 2, "1f1b", 2),
    "and of breadth-first ones": Small(10, 2, 2, "breadth-first", 3),
    "blocks wait less than the ends": Small(4, 4, 2, "1f1b", slow={"package": 300, "node": 300}),
    "and of uneven stages": Small(3, 4, 2, "1f1b", slow={"package": 300, "node": 300}),
    "a head is longer than all blocks": Small(12, 1, 4, "zb-h1", vocab=50304),
    "and in a V": Small(12, 1, 2, "zb-v", 2, vocab=50304),
    "uneven stages in a V": Small(7, 1, 2, "zb-v", 2),
    "uneven ones of split backwards": Small(9, 1, 4, "zb-h2", given=(1, 4, 3, 1)),
    "a head is tied over a slow link": Small(
        4, 1, 2, "1f1b", tied=True, vocab=50304, slow={"world": 300}, ranks=16
    ),
    "messages are longer than stages": Small(8, 1, 4, "1f1b", slow={"node": 3000, "world": 3000}, ranks=16),
    "and hide among breadth-first ones": Small(12, 1, 2, "breadth-first", 3, slow={"node": 30, "world": 30}),
}  # fmt: skip


@pytest.mark.parametrize("hidden", ["all", "none"])
@pytest.mark.parametrize("small", SMALL.values(), ids=SMALL)
def test_nor_does_a_small_one(small: Small, hidden: str) -> None:
    drawn, search, bounds = Random(1), Search(False, (), MODEL_ERROR), Bounds()
    for base in small.bases(OURS.with_options({"hidden_sends": hidden})):
        of_base = table(base, (), exact=False)
        below = [search._near(base, of_base, one)[0] for one in (bounds.of(base), floor(base))]
        for j in drawn.sample(range(len(of_base.schemes)), min(4, len(of_base.schemes))):
            step = step_time(base.varied(scheme=of_base.schemes[j])).total
            assert all(np.all(each[j] <= step * (1 + 1e-12)) for each in below)


@pytest.mark.parametrize("case", CASES)
def test_bounds_of_all_jobs_at_once_are_those_of_each(case: tuple[str, str, int, int]) -> None:
    """With some of the layers recomputed, too, which are then one array."""
    jobs = bases(*case, count=10)
    jobs += [
        base.varied(recomputed=part) for part in (0.25, 0.5) for base in jobs if base.recompute == "full"
    ]
    for base, bound in zip(jobs, Bounds().of_all(jobs), strict=True):
        alone = Bounds().of(base)
        assert all(map(np.array_equal, (bound.least, bound.busy), (alone.least, alone.busy)))


@pytest.mark.parametrize("small", SMALL.values(), ids=SMALL)
def test_peaks_are_those_of_each_candidate_and_not_below_the_least(small: Small) -> None:
    drawn, peaks = Random(2), Peaks()
    for base in small.bases(OURS):
        of_base = table(base, (), exact=False)
        found, least = peaks.under(base, of_base)[0], peaks.least(base)
        if base.axes.is_uneven:
            assert np.all(peaks.least_under(base, of_base) <= found)
        for j in drawn.sample(range(len(of_base.schemes)), min(4, len(of_base.schemes))):
            job = base.varied(scheme=of_base.schemes[j])
            peak = np.broadcast_to(peak_bytes(memory_items(job), job.keeps_grads), np.shape(job.micro_batch))
            assert np.all(found[j] == peak) and np.all(least <= peak)


@pytest.mark.parametrize(
    "small",
    [
        *(one for one in SMALL.values() if one.given),
        Small(39, 1, 2, "dualpipe-v", 2), Small(39, 1, 4, "zb-v", 2), Small(22, 1, 4, "1f1b", 3),
    ],
)  # fmt: skip
def test_each_rank_of_uneven_stages_holds_no_less_than_the_least(small: Small) -> None:
    """However few micro-batches there are: in a V a rank then holds less than the fullest rank could."""
    for base in small.bases(OURS):
        if not base.axes.is_uneven:
            continue
        shape, points = base.points()
        for i, one in enumerate(points):
            held = [float(of_passes(one, place, kept(one))["activations"]) for place in places(one)]
            assert np.all(np.reshape(Peaks()._held(base), (len(held), *shape))[:, i] <= held)


@pytest.mark.parametrize("case", CASES)
def test_and_those_of_large_jobs(case: tuple[str, str, int, int]) -> None:
    """Whatever else has been looked at, with states beyond the device, too."""
    drawn, peaks = Random(3), Peaks()
    of_all = bases(*case, count=40)
    several = [base for base in of_all if np.size(base.micro_batch) > 2]
    for base in drawn.sample(several, 6):
        on_host = [base.varied(beyond=HOST)] if base.recompute != "host" else []
        for one in (base, *on_host):
            of_base = table(one, (), exact=True)
            (peak, short), least = peaks.under(one, of_base), peaks.least(one)
            if one.axes.is_uneven:
                assert np.all(peaks.least_under(one, of_base) <= peak)
            j = drawn.randrange(len(of_base.schemes))
            job = one.varied(scheme=of_base.schemes[j])
            items = memory_items(job)
            assert np.all(peak[j] == peak_bytes(items, job.keeps_grads)) and np.all(least <= peak[j])
            room = peak[j] - job.machine.device.memory_gib * GIB
            assert np.all(short[j] == np.maximum(short_by(job, items), room))


def test_only_what_fits_is_predicted_in_time() -> None:
    machine, stack = setting(CONFIG, "dgx-a100-40gb", None)
    model = CONFIG.model("gpt-20b")
    of = machine, stack, model, 64, 2048, 256, axes_to_try(machine, model, [1, 8], [1, 2], seq_len=2048)
    found = plan(*of)
    assert not any(one.short_by for one in found.candidates.values())
    assert len(found.candidates) < found.tried / 20
    first = chosen(found)[0]
    others = {one.micro_batch for key, one in found.around(first).items() if differ_in_one(key, first.knobs)}
    assert others > {first.micro_batch}  # with those that do not fit
    assert any(one.short_by for one in found.candidates.values())


@pytest.mark.parametrize(
    "seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.wide) for seed in range(2, 6))]
)
def test_a_search_shows_what_all_candidates_would(seed: int) -> None:
    """Drawn jobs, some of them with hardly any memory: the same rows, however few are predicted."""
    drawn = Random(seed)
    cluster = drawn.choice(["frontier", "dgx-a100-40gb", "dgx-h100"])
    machine, stack = setting(CONFIG, cluster, None)
    layers = drawn.choice([3, 5])
    model = CONFIG.model("gpt-1.3b").model_copy(update={"layers": layers})
    gib = drawn.choice([2, 4, 16, 80])
    machine = machine.model_copy(
        update={"device": machine.device.model_copy(update={"memory_gib": gib, "framework_gib": None})}
    )
    ranks = 16
    axes = axes_to_try(machine, model, [drawn.choice([1, 4])], [1, 2], seq_len=2048)
    software = drawn.choice([(), of_stack(stack, model)])
    of = machine, stack, model, ranks, 2048, 4 * ranks, axes, [drawn.choice([1, 2])]
    some, every = (
        plan(*of, software=software, within=within, recompute=("none", "full"))
        for within in (MODEL_ERROR, np.inf)
    )
    assert some.tried == every.tried
    assert [one.knobs for one in chosen(some)] == [one.knobs for one in chosen(every)]
    assert [one.step_time_s for one in chosen(some)] == [one.step_time_s for one in chosen(every)]


def test_models_with_layers_of_two_kinds_have_plans() -> None:
    """Stages that are not predicted are left out: of 61 layers, three of them dense, all but 1 and 61."""
    assert {base.axes.pipeline for base in bases(*CASES[3], count=10**6)} == {1}
    hybrid = CONFIG.model("gpt-200k-hybrid")
    machine = CONFIG.machine("frontier")
    tried = possible(machine, hybrid, 8, axes_to_try(machine, hybrid, [1]), 64, ("all",), ())
    of = machine, CONFIG.given_stack(None, machine), hybrid, 8, 64, 32, tried, [1], ("none",)
    assert [*_bases(*of)]


@pytest.mark.parametrize("name", [name for name in SCHEDULES if name != "depth"])
def test_filled_lists_hold_no_more_than_any_longer_ones(name: Name) -> None:
    """What `least` and `least_under` rest on: with FILLED micro-batches a rank, and any more, each rank holds
    as much, as much waits, and all stages are summed at once but breadth-first."""
    row = SCHEDULES[name]
    for ranks, chunks in product((2, 3, 5), range(row.chunks[0], (row.chunks[1] or 3) + 1)):
        of_ranks = most_held(name, ranks, chunks)
        for many in (2 * ranks, 2 * ranks + 1, 3 * ranks + 2, 4 * ranks):
            found = lists(name, ranks, many, chunks)
            for of_rank, held, late, (least, waits) in zip(
                found, peak(found), owed(found), of_ranks, strict=True
            ):
                assert held >= least * chunks and late >= waits * chunks
                assert name == "breadth" or max(map(len, summing(of_rank))) == chunks


def test_the_least_under_a_placement_leaves_out_most_of_what_has_no_room() -> None:
    """405B on 512 H100, by Megatron-LM: of uneven stages."""
    machine, stack = setting(CONFIG, "eos-2024", "megatron-lm")
    model = CONFIG.model("llama-3.1-405b")
    tried = possible(machine, model, 512, axes_to_try(machine, model, [8], [16]), 8192, ("all",), ())
    peaks, room, left, short = Peaks(), capacity(machine), 0, 0
    for base in _bases(machine, stack, model, 512, 8192, 512, tried, None, RECOMPUTE):
        of_base = table(base, of_stack(stack, model), exact=True)
        if base.axes.is_uneven:
            least, found = peaks.least_under(base, of_base), peaks.under(base, of_base)[0]
            assert np.all(least <= found)
            left += int(np.sum((least <= room) & (found > room)))
            short += int(np.sum(found > room))
    assert 0 < 2 * left < short
