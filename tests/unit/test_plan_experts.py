"""`lowband plan` over ranks that divide experts: brute force, and where they send less than a gather."""

import json
import math
from collections import Counter
from dataclasses import replace
from itertools import product

import pytest

from lowband.cost.bytes import sent_bytes
from lowband.cost.numbers import GIB
from lowband.predict.experts import experts_sent
from lowband.predict.place import alike
from lowband.predict.prediction import predict
from lowband.predict.search.candidates import KNOBS
from lowband.predict.search.degrees import axes_to_try, left_out
from lowband.predict.search.placements import schemes
from lowband.predict.search.plan import plan
from lowband.predict.workload import Workload
from lowband.spec.axes import Ways
from lowband.spec.machine import Device, Level, Link, Machine
from lowband.spec.mesh import WORLD
from lowband.spec.model import ModelSpec
from lowband.spec.sourced import Fact
from lowband.spec.stack import OURS
from lowband.spec.step import Route
from tests.checkout import CONFIG
from tests.printed import printed_by

RANKS, EXPERTS, TOP_K, WIDTH = 8, 16, 2, 128
MODEL = ModelSpec(
    name="small", layers=4, hidden=256, heads=4, vocab=256, seq_len=2**16, positions="rotary", gated=True,
    biases=False, experts=EXPERTS, top_k=TOP_K, expert_hidden=WIDTH, source="none",
)  # fmt: skip
EQUAL = 9 * EXPERTS * WIDTH // (4 * TOP_K)  # tokens a rank
ROWS = ("route_out", "route_back", "route_out_grad", "route_back_grad")


def machine(kibibytes: float | None = None, node: int | None = None, rate: float = 0.001) -> Machine:
    """One level of slow links, or nodes whose own are a hundred times as fast."""
    link = {"latency_us": Fact(value=1, source="test"), "source": "test"}
    levels = [Level(name=WORLD, link=Link(gigabytes_per_s=rate, **link))]
    if node:
        levels.insert(0, Level(name="node", size=node, link=Link(gigabytes_per_s=100 * rate, **link)))
    memory = None if kibibytes is None else kibibytes * 1024 / GIB
    device = Device(name="device", peak_tflops={"bf16": 1000.0}, memory_gib=memory, source="test")
    return Machine(name="made", description="test", device=device, levels=tuple(levels))


def sent(one: Workload) -> Counter[str]:
    """Bytes of a rank's step, by row."""
    place, found = alike(one), Counter[str]()
    for numels, levels in ((place.numels, one.levels), (place.expert_numels, one.levels_alike)):
        if numels:
            of = sent_bytes(numels, one.scheme, levels, "bf16", "bf16", int(one.accumulation), False)
            found.update(Counter({row: n for (_, row, _), n in of.items()}))
    found.update(Counter({row: n for (_, row, _), n in experts_sent(one).items()}))
    return found


@pytest.mark.parametrize("accumulation", [1, 4])
@pytest.mark.parametrize("route", ["flat", "hops"])
def test_experts_at_their_ranks_send_less_below_9ei_4k_tokens(route: Route, accumulation: int) -> None:
    """Weights gathered twice and gradients reduced once, 2 bytes each, against four rows of each pair."""

    def both(tokens: int) -> tuple[int, int]:
        given = {"micro_batch": 1, "seq_len": tokens, "accumulation": accumulation, "recompute": "none"}
        of = machine(), OURS, MODEL, CONFIG.scheme("zero3").on([]), RANKS
        gathered = Workload(*of, **given)
        apart = replace(gathered, axes=Ways(expert=RANKS, route=route))
        less = sent(gathered)
        less.subtract({row: n for row, n in sent(apart).items() if not row.startswith("route")})
        return sum(less.values()), sum(n for row, n in sent(apart).items() if row in ROWS)

    gathers, travels = both(EQUAL)
    assert gathers == travels == accumulation * 18 * 4 * 256 * WIDTH * EXPERTS * (RANKS - 1) / RANKS
    assert both(EQUAL - 1)[1] < gathers < both(EQUAL + 1)[1]


@pytest.mark.parametrize("few", [True, False])
def test_a_plan_chooses_what_sends_less(few: bool) -> None:
    """Where a rank has room for a gathered block, but not for all weights, and links are slow. Recomputed
    blocks send rows six times, so that two thirds of the tokens send as much."""
    tokens = EQUAL // 3 if few else 4 * EQUAL // 3
    model = MODEL.model_copy(update={"layers": 8})
    of = OURS, model, RANKS, tokens, RANKS
    gathered = Workload(machine(), OURS, model, CONFIG.scheme("zero3").on([]), RANKS, 1, tokens)
    apart = replace(gathered, axes=Ways(expert=RANKS))
    peaks = [float(predict(one, interval=False).peak_memory_bytes) for one in (gathered, apart)]
    axes = axes_to_try(machine(), model, [1], [1], expert=[1, RANKS])
    found = plan(machine(max(peaks) / 1024 + 1), *of, axes, [1], ["full"], exact=True, within=math.inf)
    assert {one.job.axes.expert for one in found.ranked} == {1, RANKS}
    assert {one.job.scheme.weights for one in found.ranked if one.job.axes.expert == 1} == {WORLD}
    assert found.ranked[0].job.axes.expert == (RANKS if few else 1)


@pytest.mark.parametrize(("imbalance", "expected"), [(1.0, {0}), (4.0, {1, 2, 4, 8})])
def test_copies_are_chosen_where_some_ranks_are_full(imbalance: float, expected: set[int]) -> None:
    """Between tokens to experts and experts to tokens: of popular ones, and without imbalance they only
    cost."""
    given = machine(node=4, rate=1.0)
    axes = axes_to_try(given, MODEL, [1], [1], expert=[1, RANKS], copies=[0, 1, 2, 4, 8])
    of = given, OURS, MODEL, RANKS, 2**14, RANKS
    found = plan(*of, axes, [1], ["none"], exact=True, imbalance=imbalance, within=math.inf)
    apart = [one for one in found.ranked if one.job.axes.expert == RANKS]
    assert apart[0].job.axes.copies in expected
    assert {one.job.axes.copies for one in found.ranked if one.job.axes.expert == 1} == {0}
    lines = found.reasons(apart[0])
    assert any(line.startswith("copies ") for line in lines) == (imbalance > 1)


def test_copies_leave_tokens_in_their_group() -> None:
    """By every row over the outermost level alone; the fullest rank computes less; memory has the copies."""
    given = {"micro_batch": 1, "seq_len": 2**12, "imbalance": 4.0, "recompute": "none"}
    of = machine(node=4, rate=1.0), OURS, MODEL, CONFIG.scheme("ddp").on(["node"]), RANKS
    none = Workload(*of, axes=Ways(expert=RANKS), **given)
    some = replace(none, axes=Ways(expert=RANKS, copies=2))
    before, after = experts_sent(none), experts_sent(some)
    for row in ROWS:
        world, node = (
            after[level, row, "native"] / before[level, row, "native"] for level in ("world", "node")
        )
        assert world == pytest.approx(float(some.crossing), rel=1e-6)
        assert node == 1
    assert some.load < none.load
    peaks = [predict(one, interval=False) for one in (none, some)]
    kept = (
        4 * 2 * (2 + 2) * 3 * 256 * WIDTH
    )  # of 4 layers, in bf16, two experts of a rank's own and two copies
    assert peaks[1].memory_bytes["copies"] == kept
    assert "copies" not in peaks[0].memory_bytes


def test_a_plan_is_brute_force() -> None:
    given = machine(node=4, rate=1.0)
    axes = axes_to_try(given, MODEL, [2], [1], expert=[1, 2, 4])
    found = plan(
        given, OURS, MODEL, RANKS, 64, 16, axes, [1], ["none"], exact=True, imbalance=1.5, within=math.inf
    )
    expected = {}
    for one in {each.batches.axes: each for each in found.candidates.values()}.values():
        for scheme in schemes(one.batches.levels, exact=True):
            job = replace(one.job, scheme=scheme)
            values = vars(scheme) | vars(job) | vars(job.axes)
            assert job.imbalance == 1.5
            knobs = tuple(values[knob] for knob in KNOBS)
            expected[knobs] = float(predict(job, interval=False).step_time_s)
    times = {knobs: one.step_time_s for knobs, one in found.candidates.items()}
    assert times == pytest.approx(expected)
    tried = {(one.job.axes.expert, one.job.axes.route) for one in found.ranked}
    assert tried == {(1, "merged"), *product((2, 4), ("flat", "hops", "merged"))}


def test_what_is_left_out_is_said() -> None:
    assert "but those of --ep" in left_out(MODEL, [Ways()])
    assert "--ep" not in left_out(MODEL, [Ways(), Ways(expert=2)])
    assert "--ep" not in left_out(MODEL.model_copy(update={"experts": None}), [Ways()])


def test_reasons_name_the_degree_and_the_route() -> None:
    given = machine(node=4, rate=1.0)
    of = given, OURS, MODEL, RANKS, 64, 8
    found = plan(*of, axes_to_try(given, MODEL, [1], [1], expert=[1, 8]), [1], ["none"], exact=True)
    best = next(one for one in found.ranked if one.job.axes.expert == 8)
    lines = found.reasons(best)
    assert any(line.startswith("ep 8: 1 would be") for line in lines)
    assert any(line.startswith(f"route {best.job.axes.route}: ") for line in lines)
    alone = next(one for one in found.ranked if one.job.axes.expert == 1)
    assert not any(line.startswith("route") for line in found.reasons(alone))


JOB = ["--cluster", "frontier", "--model", "mixtral-8x7b", "--gpus", "64", "--root", str(CONFIG.root)]


def said(capsys: pytest.CaptureFixture[str], verb: str, *words: str, fails: bool = False) -> str:
    return printed_by(capsys, verb, *JOB, *words, code=2 * fails)


def test_predict_names_ways_to_experts(capsys: pytest.CaptureFixture[str]) -> None:
    scheme = ["--scheme", "zero3", "--seq", "2048"]
    found = said(capsys, "predict", *scheme, "--ep", "8", "--imbalance", "1.5")
    assert "ep 8, merged, the fullest rank 1.5 times the mean: a rank sends" in found
    of = json.loads(said(capsys, "predict", *scheme, "--ep", "8", "--imbalance", "1.5", "--json"))["experts"]
    sent = [of[f"{level}_sent_bytes"] for level in ("node", "package", "world")]
    assert 2**20 < sent[1] < sent[0] and 0 < sent[2] < 2**20  # loads alone leave a node, and no tokens
    assert all(f" {count / 2**30:.4g} GiB over " in found for count in sent)
    copied = said(capsys, "predict", *scheme, "--ep", "8", "--imbalance", "2", "--copies", "1")
    assert "the fullest rank 2 times the mean, 1.33 times with copies of 1: a rank sends" in copied
    several = said(capsys, "predict", *scheme, "--ep", "8", "--imbalance", "2", "--copies", "0", "2")
    assert "copies" in several.splitlines()[2]
    rows = json.loads(said(capsys, "predict", *scheme, "--ep", "1", "8", "--route", "flat", "hops", "--json"))
    assert ["experts" in row for row in rows] == [False, True, True]
    assert [row["experts"]["route"] for row in rows[1:]] == ["flat", "hops"]
    lines = said(capsys, "predict", *scheme, "--ep", "1", "8").splitlines()
    assert lines[2].split()[6:8] == ["ep", "route"]
    assert "no multiple of expert 3" in said(capsys, "predict", *scheme, "--ep", "3", fails=True)
    wide = ["--ep", "16"]
    assert "8 experts of model 'mixtral-8x7b' cannot be divided" in said(
        capsys, "predict", *scheme, *wide, fails=True
    )
    assert "ep" not in said(capsys, "predict", *scheme, "--micro-batch", "1", "2").splitlines()[2].split()


def test_plan_lists_routes(capsys: pytest.CaptureFixture[str]) -> None:
    given = [
        "--tp",
        "1",
        "--pp",
        "1",
        "--micro-batch",
        "1",
        "--recompute",
        "full",
        "--exact",
        "--seq",
        "2048",
    ]
    rows = json.loads(said(capsys, "plan", *given, "--ep", "1", "2", "4", "8", "--json"))
    assert {row["ep"] for row in rows} <= {1, 2, 4, 8}
    assert rows[0]["ep"] > 1
    assert {row["route"] for row in rows} <= {"flat", "hops", "merged"}
    refused = said(capsys, "plan", *given, "--ep", "16", fails=True)
    assert "8 experts of model 'mixtral-8x7b' cannot be divided" in refused
