"""What the predictor says of a pipeline's ranks: as their lists, and as the closed forms of counted runs."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from lowband.cost.activations import kept_bytes_per_token
from lowband.cost.collectives import Network
from lowband.cost.compute import Computer, work
from lowband.cost.stages import gathers, parts
from lowband.cost.timeline import timeline
from lowband.predict.footprint import memory_items
from lowband.predict.stage_messages import exchange_s
from lowband.predict.time import step_time
from lowband.predict.workload import Workload, workload_of
from lowband.spec.axes import Ways
from lowband.spec.model import ModelSpec
from lowband.spec.run import RunSpec
from lowband.spec.schedules import Name, lists
from lowband.spec.scheme import Scheme
from lowband.spec.stack import OURS
from lowband.spec.stages import visits
from tests.checkout import CONFIG

MODEL = ModelSpec(
    name="small", layers=8, hidden=32, heads=4, vocab=256, seq_len=64, tied_head=False, source="none"
)
RUN = CONFIG.runs(["pipeline"])[0]
EVERY: list[tuple[Name, int]] = [
    ("gpipe", 1), ("1f1b", 1), ("zb-h1", 1), ("zb-h2", 1),
    ("breadth", 2), ("breadth", 4), ("interleaved", 2), ("interleaved", 4), ("zb-v", 2), ("dualpipe-v", 2),
]  # fmt: skip
SPLIT = [(name, chunks) for name, chunks in EVERY if name in ("zb-h1", "zb-h2", "zb-v", "dualpipe-v")]


def run(**changes: Any) -> RunSpec:
    given = {"model": MODEL, "ranks": 4, "pipeline": 2, "accumulation": 4, "micro_batch": 1, "seq_len": 32}
    changes["scheme"] = CONFIG.scheme(changes.get("scheme", "zero3")).model_dump()
    return RunSpec.parse({**RUN.model_dump(), "model": MODEL.model_dump(), **given, **changes}, "test")


@pytest.mark.parametrize(("name", "chunks"), EVERY)
@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8])
def test_a_step_gathers_as_often_as_its_list_comes_to_a_stage(name: Name, chunks: int, ranks: int) -> None:
    many = np.array([[1, 2, 3], [ranks, 4 * ranks, 4 * ranks + 1], [5 * ranks, 9 * ranks, 40 * ranks]])
    forward, backward = gathers(name, ranks, many, chunks)
    for at, each in np.ndenumerate(many):
        times = visits(lists(name, ranks, int(each), chunks)[0]).values()
        counted = [sum(of_kind) / chunks for of_kind in zip(*times, strict=True)]
        assert [np.broadcast_to(found, many.shape)[at] for found in (forward, backward)] == counted


@pytest.mark.parametrize(("name", "chunks"), EVERY)
@pytest.mark.parametrize("scheme", ["zero1", "zero2", "zero3", "ddp"])
def test_memory_is_that_of_the_runs_first_rank(name: Name, chunks: int, scheme: str) -> None:
    """cost/stages.py's, which runs are counted against (tests/dist/test_run_stages.py): exact, or where the
    first rank has the last stage, too, at most head, norm and a block more."""
    spec = run(scheme=scheme, schedule=name, chunks=chunks)
    part, job = parts(spec)[0], workload_of(spec)
    items = memory_items(job)
    both_ends = name in ("zb-v", "dualpipe-v")
    optim = sum(part.units) // (1 if scheme == "ddp" else 2)
    more = 256 * 32 + 2 * 32 + part.units[3] if both_ends else 0
    gathered = part.gathered if scheme == "zero3" else 0
    assert gathered <= float(items["gathered"]) / 4 <= gathered + more
    assert float(items["grads"]) == 4 * max(part.summed, optim)
    assert float(items["optim"]) == 12 * optim
    assert job.keeps_grads
    alone = replace(job, accumulation=1)
    assert float(memory_items(alone)["grads"]) == float(items["optim"]) / 3
    assert not alone.keeps_grads


@pytest.mark.parametrize(("name", "chunks"), SPLIT)
@pytest.mark.parametrize("accumulation", [1, 3, 8, 20])
@pytest.mark.parametrize("recomputed", [1.0, 0.5])
def test_what_is_recomputed_stays_until_the_weight_part(
    name: Name, chunks: int, accumulation: int, recomputed: float
) -> None:
    """Played action by action on every rank; where both kinds are not at their most at once, it is less."""
    spec = run(ranks=8, pipeline=4, schedule=name, chunks=chunks, accumulation=accumulation)
    job = replace(workload_of(spec), recompute="full", recomputed=recomputed)
    some, whole = (kept_bytes_per_token(MODEL, 32, kind, "flash") for kind in ("full", "none"))
    block, working = recomputed * some.block + (1 - recomputed) * whole.block, recomputed * some.working
    played = []
    for of_rank in lists(name, 4, accumulation, chunks):
        held = most = 0.0
        for action in of_rank:
            if action.kind == "forward":
                held += block
            most = max(most, held + (working if action.kind in ("input", "backward") else 0))
            held += working * (action.kind == "input")
            if action.kind == "weight":
                held -= block + working
            elif action.kind == "backward":
                held -= block
        played.append(most)
    expected = 32 * MODEL.layers / 4 / chunks * max(played)
    found = float(memory_items(job)["activations"])
    assert expected * (1 - 1e-12) <= found
    if accumulation >= 8:  # they fill the pipeline
        assert found <= (1.1 if recomputed == 1 else 1.3) * expected


@pytest.mark.parametrize(("name", "chunks"), SPLIT)
def test_the_input_part_computes_the_forward_again(name: Name, chunks: int) -> None:
    spread = {"speed_spread": None}
    machine = CONFIG.machine("frontier")
    machine = machine.model_copy(update={"device": machine.device.model_copy(update=spread)})
    job = Workload(
        machine, OURS, MODEL, Scheme(name="ddp", weights="self", grads="self", optim="self"), 4, 1, 32, 6,
        axes=Ways(pipeline=4, chunks=chunks, schedule=name),
    )  # fmt: skip
    items = step_time(replace(job, stack=OURS.with_options({"hidden_sends": "none"}))).items
    block = work(Computer(machine, "bf16"), MODEL, 1, 32, "full", "flash")
    assert block.recompute == block.forward > 0
    send = exchange_s(job, Network(machine, OURS, shards=False)).mean / 2
    of_rank = (
        2 * block.forward + send,
        2 * (block.recompute + block.backward - block.weight) + send,
        2 * block.weight,
    )
    played = timeline(lists(name, 4, 6, chunks), *(seconds / chunks for seconds in of_rank))
    assert items["bubble"] == pytest.approx(float(played.step_s) - 6 * sum(of_rank), rel=1e-9)


def test_breadth_first_holds_every_micro_batch_of_uneven_stages() -> None:
    """However many there are: beyond four a rank, from which on other schedules hold no more."""
    machine, axes = CONFIG.machine("dgx-h100"), Ways.of_options(1, 2, 2, "breadth-first", (2, 2, 3, 1))
    of = machine, OURS, MODEL, CONFIG.scheme("ddp"), 2, 1, 64
    held = [memory_items(Workload(*of, many, "none", axes=axes))["activations"] for many in (8, 9, 16, 32)]
    assert [one / held[0] for one in held] == pytest.approx([1, 9 / 8, 2, 4])
