"""What the predictor says of stages with different numbers of blocks, against sums written out here."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from test_predict_stages import MODEL, run

from lowband.cost.activations import LOGIT_BYTES, kept_bytes_per_token
from lowband.cost.compute import Computer, Work, work
from lowband.cost.stages import parts
from lowband.errors import UserError
from lowband.predict.blocks import of_blocks
from lowband.predict.footprint import items_at, kept, memory_items, of_passes, peak_bytes
from lowband.predict.place import fullest, places, unlike
from lowband.predict.prediction import predict
from lowband.predict.search.degrees import axes_to_try
from lowband.predict.search.plan import plan
from lowband.predict.time import _at, step_time
from lowband.predict.workload import Workload, workload_of
from lowband.spec.axes import InStages, Ways
from lowband.spec.run import RunSpec
from lowband.spec.schedules import Name, lists
from lowband.spec.scheme import Scheme
from lowband.spec.stack import OURS
from lowband.spec.step import Schedule
from tests.checkout import CONFIG
from tests.printed import printed_by

SEVEN = MODEL.model_copy(update={"layers": 7})
DDP = Scheme(name="ddp", weights="self", grads="self", optim="self")
FRONTIER = CONFIG.machine("frontier")
ALIKE = FRONTIER.model_copy(update={"device": FRONTIER.device.model_copy(update={"speed_spread": None})})
SPLITS: list[tuple[Schedule, Name, int, tuple[int, ...]]] = [  # of seven blocks over two ranks
    ("1f1b", "1f1b", 1, (3, 4)),
    ("breadth-first", "breadth", 1, (5, 2)),
    ("zb-h1", "zb-h1", 1, (4, 3)),
    ("zb-h2", "zb-h2", 1, (4, 3)),
    ("1f1b", "interleaved", 2, (3, 1, 2, 1)),
    ("breadth-first", "breadth", 3, (1, 2, 1, 1, 1, 1)),
    ("zb-v", "zb-v", 2, (1, 1, 2, 3)),
    ("dualpipe-v", "dualpipe-v", 2, (1, 2, 3, 1)),
]


def job(schedule: Schedule, chunks: int, layers: tuple[int, ...], **changes: Any) -> Workload:
    """Seven blocks over two ranks, with no rank beside them."""
    axes = Ways(pipeline=2, chunks=chunks, schedule=schedule, layers=layers)
    return replace(Workload(ALIKE, OURS, SEVEN, DDP, 2, 1, 32, 5, axes=axes), **changes)


def played(
    one: Workload, name: Name, layers: tuple[int, ...], block: Work, send_s: float
) -> tuple[float, list[float]]:
    """Seconds of a step, and for which each rank computes or sends: every action as early as it can be.

    Written for itself: rank by rank, over and over, until nothing is left.
    """
    ranks, last = one.axes.pipeline, len(layers) - 1

    def seconds(kind: str, stage: int) -> float:
        head, blocks = stage == last, layers[stage]
        weight = blocks * block.weight + head * block.head_weight
        backward = blocks * (block.recompute + block.backward) + head * block.head_backward + send_s
        forward = blocks * block.forward + head * block.head_forward + send_s
        return {"forward": forward, "backward": backward, "input": backward - weight, "weight": weight}[kind]

    left = [list(of_rank) for of_rank in lists(name, ranks, int(one.accumulation), one.axes.chunks)]
    free, busy, done = [0.0] * ranks, [0.0] * ranks, dict[tuple[str, int, int], float]()
    while any(left):
        for rank, actions in enumerate(left):
            while actions:
                kind, stage, i = actions[0]
                needs = {
                    "forward": [("F", stage - 1, i)] if stage else [],
                    "weight": [("I", stage, i)],
                }.get(kind, [("F", stage, i), *([("I", stage + 1, i)] if stage < last else [])])
                if any(need not in done for need in needs):
                    break
                takes = seconds(kind, stage)
                free[rank] = max([free[rank], *(done[need] for need in needs)]) + takes
                busy[rank] += takes
                done["F" if kind == "forward" else "W" if kind == "weight" else "I", stage, i] = free[rank]
                actions.pop(0)
    return max(free), busy


@pytest.mark.parametrize(("schedule", "name", "chunks", "layers"), SPLITS)
@pytest.mark.parametrize("accumulation", [1, 2, 5])
@pytest.mark.parametrize("recompute", ["none", "full"])
def test_a_step_is_played_with_each_stages_time(
    schedule: Schedule, name: Name, chunks: int, layers: tuple[int, ...], accumulation: int, recompute: Any
) -> None:
    """Also with fewer micro-batches than ranks. Nothing is exchanged along data."""
    one = job(schedule, chunks, layers, accumulation=accumulation, recompute=recompute)
    stack = OURS.model_copy(update={"launch_us": None, "unit_us": None, "hidden_sends": "none"})
    items = step_time(replace(one, stack=stack)).items
    block = work(Computer(ALIKE, "bf16"), SEVEN, 1, 32, recompute, "flash")
    send_s = float(items["pipeline_exchange"]) / accumulation / chunks / 2
    step_s, busy = played(one, name, layers, block, send_s)
    found = {name: float(items[name]) for name in ("forward", "recompute", "backward", "pipeline_exchange")}
    assert any(sum(found.values()) == pytest.approx(of_rank, rel=1e-9) for of_rank in busy)
    assert sum(found.values()) + float(items["bubble"]) == pytest.approx(step_s, rel=1e-9)
    assert not any(float(time) for name, time in items.items() if name.startswith("exposed"))


@pytest.mark.parametrize("layers", [["0", "16", "16", "16"], ["16", "16", "16", "0"]])
def test_a_stage_without_blocks_is_refused_in_a_line(
    layers: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """Megatron-LM can have its embedding or its head alone in a stage."""
    asked = ["predict", "--cluster", "frontier", "--model", "gpt-22b", "--scheme", "zero1", "--gpus", "8"]
    line = printed_by(capsys, *asked, "--pp", "4", "--layers", *layers, code=2)
    assert line.endswith("'0': a stage of embeddings or head alone (allowed: 1 or more blocks each)")


@pytest.mark.parametrize(("schedule", "chunks"), [("1f1b", 1), ("breadth-first", 1), ("zb-h1", 1)])
@pytest.mark.parametrize("accumulation", [1, 3, 8])
def test_equally_many_are_predicted_as_without_layers(
    monkeypatch: pytest.MonkeyPatch, schedule: Schedule, chunks: int, accumulation: int
) -> None:
    """Told apart, the last stage sets the pace: where backwards are whole, as long as in the closed form."""
    told = Ways(pipeline=4, chunks=chunks, schedule=schedule, layers=(2, 2, 2, 2))
    one = Workload(ALIKE, OURS, MODEL, DDP, 4, 1, 32, accumulation, axes=told)
    without = replace(one, axes=told.model_copy(update={"layers": ()}))
    expected = step_time(without)
    assert step_time(one) == expected
    assert memory_items(one) == memory_items(without)
    monkeypatch.setattr(InStages, "is_uneven", property(lambda axes: bool(axes.layers)))
    found = step_time(one)
    apart, together = (float(step.total - step.items["optimizer"]) for step in (found, expected))
    assert apart <= together * (1 + 1e-12)
    if schedule != "zb-h1":  # others wait for the last rank's head, and there can put off weight parts
        assert apart == pytest.approx(together, rel=1e-12)


def of_ranks(spec: RunSpec) -> list[dict[str, float]]:
    """Bytes of each rank, from what runs are counted against (tests/dist/test_uneven_stages.py), and of the
    activations that its list holds at the most."""
    kept, model = kept_bytes_per_token(spec.model, spec.seq_len, spec.recompute, "flash"), spec.model
    tokens = spec.micro_batch * spec.seq_len
    found = []
    for part, actions in zip(parts(spec), spec.lists, strict=True):
        held, again, most = 0, 0, 0.0
        for kind, stage, _ in actions:
            blocks = spec.layers[stage]
            held += blocks * (kind == "forward")
            again += blocks * (kind == "input")
            most = max(most, held * kept.block + (again + (kind == "backward")) * kept.working)
            held -= blocks * (kind in ("backward", "weight"))
            again -= blocks * (kind == "weight")
        optim = sum(part.units) // spec.levels.size(spec.scheme.optim)
        has_head = any(action.stage == spec.stages - 1 for action in actions)
        found.append(
            {
                "weights": 4 * sum(part.units) if spec.scheme.name == "zero1" else 0,
                "optim": 12 * optim,
                "grads": 4 * max(part.summed if spec.accumulation > 1 else 0, optim),
                "gathered": 4 * part.gathered if spec.scheme.name == "zero3" else 0,
                "activations": tokens * most,
                "logits": has_head * tokens * LOGIT_BYTES * model.vocab,
            }
        )
    return found


@pytest.mark.parametrize(("schedule", "name", "chunks", "layers"), SPLITS)
@pytest.mark.parametrize("scheme", ["zero1", "zero3"])
@pytest.mark.parametrize("accumulation", [1, 6])
@pytest.mark.parametrize("micro_batch", [1, 64])
def test_memory_is_that_of_the_fullest_rank(
    schedule: Schedule, name: Name, chunks: int, layers: Any, scheme: str, accumulation: int, micro_batch: int
) -> None:
    options: dict[str, Any] = {"model": SEVEN.model_dump(), "layers": layers, "recompute": "full"}
    spec = run(
        scheme=scheme, schedule=name, chunks=chunks, accumulation=accumulation, micro_batch=micro_batch,
        **options,
    )  # fmt: skip
    one = workload_of(spec)
    assert one.axes.blocks(SEVEN) == layers
    items = memory_items(one)
    expected = of_ranks(spec)
    assert {kind: float(items[kind]) for kind in expected[0]} in expected
    peaks = [float(peak_bytes({**items, **of_rank}, one.keeps_grads)) for of_rank in expected]
    assert float(peak_bytes(items, one.keeps_grads)) == max(peaks)


@pytest.mark.parametrize("scheme", ["ddp", "zero1", "zero3", "zero3-host"])
@pytest.mark.parametrize(("schedule", "chunks"), [("zb-v", 2), ("1f1b", 2), ("zb-h1", 1)])
@pytest.mark.parametrize(("micro_batch", "accumulation"), [(1, 64), (16, 9)])
def test_no_place_that_is_left_out_takes_longer_or_holds_more(
    scheme: str, schedule: Schedule, chunks: int, micro_batch: int, accumulation: int
) -> None:
    """Down a V each rank gathers more often, and holds more, than the one before it: few can be the one."""
    layers = (4, *[5] * 7) if chunks == 1 else (*[3] * 7, *[2] * 9)
    axes = Ways(pipeline=8, chunks=chunks, schedule=schedule, layers=layers)
    model = MODEL.model_copy(update={"layers": 39})
    one = Workload(
        ALIKE, OURS, model, CONFIG.scheme(scheme), 16, micro_batch, 32, accumulation, axes=axes
    )  # fmt: skip
    of, here, every = of_blocks(one, "value"), kept(one), places(one)
    steps = [float(_at(place, one, "value", of).total) for place in every]
    of_places = [items_at(one, place, of_passes(one, place, here)) for place in every]
    assert float(step_time(one).total) == max(steps)
    held = float(peak_bytes(memory_items(one), one.keeps_grads))
    assert held == max(float(peak_bytes(items, one.keeps_grads)) for items in of_places)
    assert len(unlike(one)) < len(every) == 8
    assert schedule != "zb-v" or len(fullest(one)) < len(every)


def test_a_grid_is_its_points() -> None:
    many = {"micro_batch": np.array([[1], [64]]), "accumulation": np.array([1, 3, 9])}
    grid = job("1f1b", 2, (3, 1, 2, 1), **many, faster={"world": np.array([1.0, 2.0, 1.0])})
    found = predict(grid)
    assert np.shape(found.step_time_s) == np.shape(found.peak_memory_bytes) == (2, 3)
    for (i, k), step_s in np.ndenumerate(found.step_time_s):
        numbers = {
            "micro_batch": int(many["micro_batch"][i, 0]),
            "accumulation": int(many["accumulation"][k]),
        }
        alone = predict(replace(grid, **numbers, faster={"world": (1.0, 2.0, 1.0)[k]}))
        assert (step_s, found.peak_memory_bytes[i, k]) == (alone.step_time_s, alone.peak_memory_bytes)


def test_a_head_as_long_as_blocks_asks_for_fewer_beside_it() -> None:
    """This one has as many products as 2.4 of its model's blocks."""
    model = CONFIG.model("llama-3-8b")
    even = Workload(ALIKE, OURS, model, DDP, 8, 1, 8192, 64, axes=Ways(pipeline=8))
    less, more = (5, 5, 5, 4, 4, 4, 3, 2), (2, 3, 4, 4, 4, 5, 5, 5)
    of_less, of_more = (
        float(step_time(replace(even, axes=Ways(pipeline=8, layers=each))).total) for each in (less, more)
    )
    assert of_less < float(step_time(even).total) < of_more


def test_a_plan_has_the_stages_that_are_given() -> None:
    machine = CONFIG.machine("frontier")
    axes = axes_to_try(machine, SEVEN, [1], None, (3, 1, 2, 1))
    found = plan(machine, OURS, SEVEN, 4, 32, 8, axes, recompute=["full"], exact=True, within=np.inf)
    stages = {(c.job.axes.pipeline, c.job.axes.chunks, c.job.axes.layers) for c in found.ranked}
    assert stages == {(4, 1, (3, 1, 2, 1)), (2, 2, (3, 1, 2, 1))}
    with pytest.raises(UserError, match=r"layers \[3, 1, 2, 2\] for 4 stages of 7 layers"):
        plan(machine, OURS, SEVEN, 4, 32, 8, axes_to_try(machine, SEVEN, [1], None, (3, 1, 2, 2)))
    with pytest.raises(UserError, match=r"with pipeline 1 .allowed: pipeline 2 or more, or no layers"):
        plan(machine, OURS, SEVEN, 4, 32, 8, axes_to_try(machine, SEVEN, [1], None, (7,)))
