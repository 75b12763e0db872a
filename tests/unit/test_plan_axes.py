"""`lowband plan` over data, tensor and pipeline: every schedule, only what fits, and a suite that runs it."""

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from itertools import product
from pathlib import Path
from typing import get_args

import pytest
import yaml

from lowband.__main__ import main
from lowband.cost.numbers import GIB
from lowband.errors import UserError
from lowband.predict.prediction import predict
from lowband.predict.request import setting
from lowband.predict.search.candidates import KNOBS, Plan
from lowband.predict.search.degrees import axes_to_try, ends, possible
from lowband.predict.search.placements import schemes
from lowband.predict.search.plan import plan
from lowband.predict.workload import Workload, workload_of
from lowband.spec.axes import Ways
from lowband.spec.config import Config
from lowband.spec.machine import Machine
from lowband.spec.model import ModelSpec
from lowband.spec.stack import OURS
from lowband.spec.step import Recompute, Schedule
from tests.checkout import CONFIG

MODEL = ModelSpec(
    name="small", layers=8, hidden=64, heads=4, vocab=512, seq_len=64, tied_head=False, source="none"
)
TIED = MODEL.model_copy(update={"tied_head": True})
RANKS, BATCH = 8, 16
KIBIBYTES = 3000  # a rank's memory: some of the choices fit


@cache
def machine(kibibytes: float) -> Machine:
    found, _ = setting(CONFIG, "frontier", "ours")
    device = {"memory_gib": kibibytes * 1024 / GIB, "framework_gib": None}
    return found.model_copy(update={"device": found.device.model_copy(update=device), "tiers": {}})


@cache
def planned(model: ModelSpec, kibibytes: float) -> Plan:
    axes = axes_to_try(machine(kibibytes), model, [1, 2], [1, 2, 4])
    of = machine(kibibytes), OURS, model, RANKS, 64, BATCH, axes, [1, 2]
    return plan(*of, exact=True, within=math.inf)


WAYS = ["heads", "gather", "ring", *(
    f"package={inside},node={outside}" for inside, outside in product(("heads", "gather", "ring"), repeat=2)
    if inside != outside
)]  # fmt: skip


def brute_force(
    pipelines: tuple[int, ...] = (1, 2, 4),
    along: tuple[int, ...] = (1,),
    recomputes: Sequence[Recompute] = ("none", "op", "full", "host"),
    micro_batches: tuple[int, ...] = (1, 2),
) -> dict[tuple[object, ...], tuple[float, float]]:
    """Seconds and bytes, by knobs, of every point that `predict` takes."""
    found = {}
    for tensor, pipeline, context, way, schedule, chunks, recompute, micro in product(
        (1, 2), pipelines, along, WAYS, get_args(Schedule), (1, 2, 4, 8), recomputes, micro_batches
    ):
        if (context == 1 and way != "ring") or ("=" in way and (context, tensor) != (4, 1)):
            continue  # a mix needs two levels
        data = RANKS // tensor // pipeline // context
        if not data:
            continue
        if BATCH % (data * micro) or (
            pipeline == 1 and (chunks > 1 or schedule not in ("1f1b", "breadth-first"))
        ):
            continue
        if schedule == "breadth-first" and data * micro == BATCH:
            continue  # one micro-batch has no order
        axes = Ways.of_options(tensor, pipeline, chunks, schedule, cp=context)
        axes = axes.model_copy(update={"context_attention": way})
        try:
            job = Workload(
                machine(KIBIBYTES), OURS, MODEL, CONFIG.scheme("ddp"), RANKS, micro, 64,
                BATCH // data // micro, recompute=recompute, axes=axes,
            )  # fmt: skip
        except UserError:
            continue
        for scheme in schemes(job.levels, exact=True):
            one = predict(replace(job, scheme=scheme), interval=False)
            values = vars(scheme) | vars(job) | vars(axes)
            knobs = tuple(values[knob] for knob in KNOBS)
            found[knobs] = float(one.step_time_s), float(one.peak_memory_bytes)
    return found


def equal_to_brute_force(found: Plan, expected: dict[tuple[object, ...], tuple[float, float]]) -> None:
    """But for what is tried where memory is short, which is beside it: test_plan_relief.py."""
    whole = {one.knobs for one in found.candidates.values() if one.job.recomputed == 1}
    ranked = [one for one in found.ranked if one.job.recomputed == 1]
    assert whole == expected.keys()
    fitting = {knobs for knobs, (_, peak) in expected.items() if peak <= KIBIBYTES * 1024}
    assert 0 < len(fitting) < len(expected)
    assert {one.knobs for one in ranked} == fitting
    for one in ranked:
        seconds, peak = expected[one.knobs]
        assert one.step_time_s == pytest.approx(seconds, rel=1e-12)
        assert peak == pytest.approx(float(predict(one.job, interval=False).peak_memory_bytes), rel=1e-12)
    assert ranked[0].step_time_s == min(one.step_time_s for one in ranked)


def test_a_plan_over_axes_is_brute_force() -> None:
    found = planned(MODEL, KIBIBYTES)
    equal_to_brute_force(found, brute_force())
    in_stages = {(one.job.axes.schedule, one.job.axes.chunks) for one in found.ranked if one.job.is_in_stages}
    assert {schedule for schedule, _ in in_stages} == set(get_args(Schedule))
    assert {("1f1b", 1), ("1f1b", 2), ("1f1b", 4), ("breadth-first", 4)} <= in_stages


def test_a_plan_over_context_is_brute_force() -> None:
    """Beside tensor and pipeline, in every way for the levels that it crosses."""
    axes = axes_to_try(machine(KIBIBYTES), MODEL, [1, 2], [1, 2], context=[1, 4])
    of = machine(KIBIBYTES), OURS, MODEL, RANKS, 64, BATCH, axes, [1], ["none"]
    found = plan(*of, exact=True, within=math.inf)
    equal_to_brute_force(found, brute_force((1, 2), (1, 4), ["none"], (1,)))
    tried = {(one.job.axes.context, one.job.axes.context_attention) for one in found.candidates.values()}
    mixed = ("package=heads,node=gather", "package=heads,node=ring", "package=gather,node=ring")
    one_way = {(context, way) for context in (4,) for way in ("heads", "gather", "ring")}
    assert tried == {(1, "ring"), *one_way, *((4, way) for way in mixed)}
    assert any(one.job.axes.context > 1 and one.job.is_in_stages for one in found.ranked)
    assert found.left_out == "not tried: ranks along context without zigzag, which is never faster"
    best = next(one for one in found.ranked if one.job.axes.context == 4)
    reasons = dict(line.split(": ", 1) for line in found.reasons(best))
    assert reasons["cp 4"].startswith("1 ")
    assert reasons[f"ways {best.job.axes.context_attention}"].endswith("slower")


@pytest.mark.parametrize(("way", "says"), [("rign", "unknown way 'rign'"), ("nod=ring", "no level 'nod'")])
def test_a_way_that_is_no_way_is_not_left_out(way: str, says: str) -> None:
    """Beside others that are, it would be missed by nobody."""
    axes = axes_to_try(machine(KIBIBYTES), MODEL, [1], [1], context=[1, 2])
    with pytest.raises(UserError, match=says):
        plan(machine(KIBIBYTES), OURS, MODEL, RANKS, 64, BATCH, axes, ways=["ring", way])


def test_zigzag_is_never_slower() -> None:
    axes = Ways(context=4)
    for way, seq_len in product(["heads", "gather", "ring", "package=gather,node=ring"], (16, 64)):
        job = Workload(
            machine(KIBIBYTES), OURS, MODEL, CONFIG.scheme("ddp"), RANKS, 1, seq_len,
            axes=axes.model_copy(update={"context_attention": way}),
        )  # fmt: skip
        without = replace(job, axes=job.axes.model_copy(update={"zigzag": False}))
        times = [float(predict(one, interval=False).step_time_s) for one in (job, without)]
        assert times[0] == times[1] if way == "heads" else times[0] < times[1]


def test_a_stage_is_in_memory_whole() -> None:
    """Sharding weights and gradients inside a stage saves no memory in a step, but the optimizer's."""
    scheme = {name: CONFIG.scheme(name) for name in ("zero1", "zero3")}
    peaks = {}
    for name, placed in scheme.items():
        job = Workload(
            machine(KIBIBYTES), OURS, MODEL, placed, RANKS, 1, 64, 8, axes=Ways(pipeline=4), recompute="none"
        )
        items = predict(job, interval=False).memory_bytes
        peaks[name] = float(items["weights"] + items["gathered"]), float(items["grads"])
    assert peaks["zero3"] == peaks["zero1"]


def test_every_schedule_is_tried_where_two_stages_share_an_embedding() -> None:
    found = planned(TIED, KIBIBYTES)
    schedules = {one.job.axes.schedule for one in found.candidates.values() if one.job.is_in_stages}
    assert schedules == set(get_args(Schedule))
    assert found.left_out == "not tried: ranks along context, but those of --cp"


def test_stages_that_are_not_predicted_are_not_tried() -> None:
    """Seven blocks on four stages are two, two, two and one; not of a model of which some have no experts.
    Six of which every second is one of softmax are on two stages three each, which differ."""
    machine = CONFIG.machine("dgx-a100-40gb")
    model = ModelSpec(name="g", layers=7, hidden=64, heads=8, vocab=96, seq_len=512, source="made up")

    def found(stages: int, **changes: object) -> set[tuple[int, ...]]:
        one = model.model_copy(update=changes)
        return {way.layers for way in possible(machine, one, 4, [Ways(pipeline=stages)], 512, [], [])}

    assert found(4) == {(2, 2, 2, 1)}
    assert found(4, layers=8, experts=4, dense_layers=1) == {()}
    with pytest.raises(UserError, match="7 layers cannot be divided over 4 stages"):
        found(4, experts=4, dense_layers=1)
    hybrid = {"attention": "linear", "softmax_every": 2}
    assert found(2, layers=8, **hybrid) == {()}
    with pytest.raises(UserError, match="not every 2-th layer is one of softmax are not predicted"):
        found(2, layers=6, **hybrid)


@pytest.mark.parametrize(
    ("layers", "stages", "expected"),
    [
        (126, 64, (1, *[2] * 62, 1)), (126, 16, (7, *[8] * 14, 7)), (105, 2, (53, 52)), (8, 4, ()),
        (96, 7, (13, *[14] * 5, 13)), (8, 5, (1, 2, 2, 2, 1)), (8, 3, (3, 3, 2)), (8, 9, None), (8, 6, None),
        (1, 2, None), (3, 2, (2, 1)),
    ],
)  # fmt: skip
def test_the_ends_of_a_pipeline_have_a_block_less(
    layers: int, stages: int, expected: tuple[int, ...] | None
) -> None:
    assert ends(layers, stages) == expected


@pytest.mark.parametrize(
    ("tensor", "pipeline", "context", "layers"),
    [
        (1, 1, 1, ()), (2, 1, 1, ()), (1, 2, 1, ()), (2, 4, 1, ()), (2, 1, 2, ()), (1, 2, 2, (5, 3)),
        pytest.param(1, 2, 2, (), marks=pytest.mark.wide),
        pytest.param(1, 2, 1, (5, 3), marks=pytest.mark.wide),
    ],
    ids=lambda value: "-".join(map(str, value)) if isinstance(value, tuple) else None,
)  # fmt: skip
def test_the_suite_that_it_writes_is_the_plan(
    tensor: int,
    pipeline: int,
    context: int,
    layers: tuple[int, ...],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    model, root = tmp_path / "small.yaml", tmp_path / "root"
    root.mkdir()
    model.write_text(yaml.safe_dump(MODEL.model_dump(exclude={"name"})))
    options = ["--cluster", "frontier", "--stack", "ours", "--model", str(model), "--gpus", "8", "--exact"]
    axes = ["--tp", str(tensor), "--pp", str(pipeline), "--micro-batch", "1", "--global-batch", "32"]
    axes += ["--cp", str(context)]
    axes += ["--layers", *map(str, layers)] if layers else []
    assert main(["plan", *options, *axes, "--write", "found", "--root", str(root)]) == 0
    assert "not tried: " in capsys.readouterr().out
    [run] = Config(root).runs(["found"])
    assert (run.tensor, run.pipeline, run.context) == (tensor, pipeline, context)
    assert run.is_in_stages == (pipeline > 1)
    assert run.layers == layers
    assert run.global_batch == 32
    found, _ = setting(CONFIG, "frontier", "ours")
    best = plan(
        found, setting(CONFIG, "frontier", "ours")[1], MODEL, 8, 64, 32,
        axes_to_try(found, MODEL, [tensor], [pipeline], layers, [context]), [1], exact=True,
    ).ranked[0]  # fmt: skip
    job = replace(workload_of(run), machine=found, stack=best.job.stack, collectives=None)
    again = predict(job, interval=False)
    assert float(again.step_time_s) == pytest.approx(best.step_time_s, rel=1e-12)
    expected = predict(best.job, interval=False).peak_memory_bytes
    assert float(again.peak_memory_bytes) == pytest.approx(float(expected), rel=1e-12)


def test_what_the_engine_does_not_cut_is_not_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A vocabulary that tensor ranks do not divide can be predicted; a run refuses it, in one line."""
    model, root = tmp_path / "odd.yaml", tmp_path / "root"
    root.mkdir()
    model.write_text(yaml.safe_dump(MODEL.model_dump(exclude={"name"}) | {"vocab": 511}))
    options = ["--cluster", "frontier", "--model", str(model), "--gpus", "8", "--tp", "2", "--pp", "1"]
    assert main(["plan", *options, "--write", "found", "--root", str(root)]) == 2
    assert "511 rows of the vocabulary cannot be divided over tensor 2" in capsys.readouterr().err
    assert not list(root.iterdir())
