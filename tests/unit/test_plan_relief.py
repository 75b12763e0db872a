"""Where memory is short a plan recomputes some layers, or has optimizer states on the host; else neither."""

import json
import math
from dataclasses import replace
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any, get_args

import pytest

from lowband.cost.numbers import GIB
from lowband.cost.tiers import Beyond
from lowband.errors import UserError
from lowband.predict.prediction import predict
from lowband.predict.request import setting
from lowband.predict.search.candidates import Candidate, Plan, knobs_of
from lowband.predict.search.choice import chosen
from lowband.predict.search.placements import schemes
from lowband.predict.search.plan import plan
from lowband.predict.search.relief import in_parts
from lowband.predict.search.software import SOFTWARE, runners
from lowband.predict.show.plan_files import write
from lowband.predict.show.plan_options import deepspeed, megatron, torchtitan
from lowband.predict.show.plan_text import records, report
from lowband.predict.workload import Workload
from lowband.spec.axes import ONLY_DATA, Ways
from lowband.spec.config import Config
from lowband.spec.machine import Machine
from lowband.spec.model import ModelSpec
from lowband.spec.sourced import Fact
from lowband.spec.step import Schedule
from tests.checkout import CONFIG

SOURCE, STACK = setting(CONFIG, "frontier", "ours")
MODEL = ModelSpec(name="small", layers=12, hidden=64, heads=4, vocab=512, seq_len=64, source="none")
RANKS, BATCH = 4, 16
PIPELINE = Ways.of_options(1, 2)
SLOW, FAST = 1e-6, 1e3  # 10^9 bytes a second that the host updates


def machine(kibibytes: float, update: float) -> Machine:
    """Small devices: with activations of 12 layers about as large as states."""
    device = SOURCE.device.model_copy(
        update={"memory_gib": kibibytes * 1024 / GIB, "framework_gib": None, "kernel_us": None}
    )
    rate = Fact(value=update, source="made up")
    host = SOURCE.tier("host").model_copy(
        update={"update_gigabytes_per_s": rate, "node_update_gigabytes_per_s": None}
    )
    return SOURCE.model_copy(update={"device": device, "tiers": {"host": host}})


@cache
def planned(kibibytes: float, update: float, within: float = math.inf) -> Plan:
    of = machine(kibibytes, update), STACK, MODEL, RANKS, 64, BATCH, [ONLY_DATA, PIPELINE], [1, 2]
    return plan(*of, ["none", "full"], exact=True, within=within, chooses=False)  # test_plan_parts.py


def jobs(kibibytes: float, update: float) -> list[Workload]:
    """Every point of that search with any part of the layers recomputed, on device or host."""
    found = []
    for axes, schedule, chunks, micro in product(
        (ONLY_DATA, PIPELINE), get_args(Schedule), (1, 2, 3, 6), (1, 2)
    ):
        way = axes.model_copy(update={"schedule": schedule, "chunks": chunks})
        if axes.pipeline == 1 and (chunks > 1 or schedule not in ("1f1b", "breadth-first")):
            continue
        of = machine(kibibytes, update), STACK, MODEL, CONFIG.scheme("ddp")
        try:
            base = Workload(*of, RANKS, micro, 64, BATCH * axes.pipeline // RANKS // micro, "none", axes=way)
        except UserError:
            continue
        kinds = [replace(base, recompute="full"), base]
        kinds += [replace(base, recompute="full", recomputed=n / 12) for n in in_parts(MODEL, way)]
        for one, beyond, scheme in product(kinds, (None, Beyond("host")), schemes(base.levels, exact=True)):
            found.append(replace(one, beyond=beyond, scheme=scheme))
    return found


@pytest.mark.parametrize(
    ("kibibytes", "update", "recomputed", "tier"),
    [(6000, SLOW, True, None), (6000, FAST, False, "host")],
    ids=["some layers", "host"],
)
def test_the_fastest_is_that_of_all(
    kibibytes: float, update: float, recomputed: bool, tier: str | None
) -> None:
    first = planned(kibibytes, update).ranked[0]
    fitting = [p for p in (predict(job, interval=False) for job in jobs(kibibytes, update)) if p.fits]
    assert first.step_time_s == pytest.approx(min(float(p.step_time_s) for p in fitting), rel=1e-12)
    assert (0 < first.job.recomputed < 1) == recomputed
    assert (first.job.beyond and first.job.beyond.optim) == tier


@pytest.mark.parametrize("kibibytes", [3000, 6000])
def test_what_is_left_out_is_not_chosen(kibibytes: float) -> None:
    every, some = (planned(kibibytes, FAST, within) for within in (math.inf, 0.075))
    assert [one.knobs for one in chosen(some)] == [one.knobs for one in chosen(every)]
    assert len(some.candidates) < len(every.candidates)


def test_where_memory_suffices_neither_is_tried() -> None:
    found = planned(40000, FAST).candidates.values()
    assert {(one.job.recomputed, one.job.beyond) for one in found} == {(1.0, None)}
    assert chosen(planned(40000, FAST))[0].job.recompute == "none"


def test_what_is_asked_for_is_all_that_is_tried() -> None:
    """No layers are recomputed where none are to be, and all where all are."""
    of = machine(6000, SLOW), STACK, MODEL, RANKS, 64, BATCH, [PIPELINE], [1]
    for asked in ("none", "full"):
        found = plan(*of, [asked], exact=True).candidates.values()
        assert {(one.job.recompute, one.job.recomputed) for one in found} == {(asked, 1.0)}


def test_parts_are_those_that_software_names() -> None:
    """Some of each stage (Megatron-LM), every n-th of a rank (torchtitan), any (llm-foundry)."""
    assert in_parts(MODEL, ONLY_DATA) == [1, 2, 3, 4, 6, 7, 9, 10]
    assert in_parts(MODEL, Ways.of_options(1, 2, 3)) == [2, 4, 6]
    assert in_parts(MODEL, Ways.of_options(1, 5, layers=(2, 3, 3, 2, 2))) == [5, 10]
    assert in_parts(MODEL, Ways.of_options(1, 1, cp=2)) == []  # not predicted
    by_part = {
        (pp, n): {row.name for row in SOFTWARE if row.partial(candidate("ddp", axes, recomputed=n / 12).job)}
        for pp, n in ((1, 5), (1, 6), (2, 2), (2, 5)) if (axes := Ways.of_options(1, pp))
    }  # fmt: skip
    assert by_part == {
        (1, 5): {"megatron-lm", "llm-foundry", "lowband"},
        (1, 6): {"megatron-lm", "llm-foundry", "torchtitan", "lowband"},
        (2, 2): {"megatron-lm", "llm-foundry", "torchtitan", "lowband"},
        (2, 5): {"llm-foundry"},
    }
    uneven = candidate("ddp", Ways.of_options(1, 4, layers=(1, 5, 5, 1)), recomputed=8 / 12).job
    assert "lowband" not in {row.name for row in SOFTWARE if row.partial(uneven)}


def candidate(scheme: str, axes: Ways, **changes: Any) -> Candidate:
    of = CONFIG.scheme(scheme), RANKS, 1, 64, 4, "full"
    job = replace(Workload(machine(6000, FAST), STACK, MODEL, *of, axes=axes), **changes)
    return Candidate(knobs_of(job, micro_batch=1), job, 1, 4, 1.0, 0.0)


def test_options_of_software_say_so() -> None:
    some = {"recomputed": 4 / 12}
    assert "--recompute-method block\n--recompute-num-layers 2\n" in megatron(
        candidate("zero1", PIPELINE, **some)
    )
    assert 'mode = "selective"\nselective_ac_option = "3"' in torchtitan(
        candidate("zero3", ONLY_DATA, **some)
    )
    hosted = {"beyond": Beyond("host")}
    assert "--optimizer-cpu-offload\n" in megatron(candidate("zero1", PIPELINE, **hosted))
    zero = json.loads(deepspeed(candidate("zero1", ONLY_DATA, **hosted)))["zero_optimization"]
    assert zero["offload_optimizer"] == {"device": "cpu", "pin_memory": True}


@pytest.mark.parametrize(
    ("scheme", "beyond", "names"),
    [
        ("zero1", Beyond("host"), {"megatron-lm", "deepspeed", "lowband"}),
        ("zero3", Beyond("host"), {"deepspeed", "lowband"}),
        ("ddp", Beyond("host"), {"lowband"}),
        ("zero3", Beyond("host", "host"), {"deepspeed", "lowband", "torchtitan"}),
        ("zero1", Beyond("host", share=0.5), {"lowband", "megatron-lm"}),
        ("zero3", Beyond("host", share=0.5), {"deepspeed", "lowband"}),
        ("zero3", Beyond("host", stride=2), {"lowband"}),
        ("zero1", Beyond.of(["optim@host"], late=True), {"lowband"}),
    ],
)
def test_who_has_states_on_the_host(scheme: str, beyond: Beyond, names: set[str]) -> None:
    assert {*runners(candidate(scheme, ONLY_DATA, beyond=beyond).job)} == names


def test_a_row_says_what_it_needs() -> None:
    for update, line, column in (
        (SLOW, "recompute full of 83.3 % of the layers, ", ("recomputed", 10 / 12)),
        (FAST, "recompute full, optim@host, ", ("tiers", "optim@host")),
    ):
        found = planned(6000, update)
        first = Plan(found.ranked[:1], found.candidates)
        assert line in report(first)
        assert column in records(first)[0].items()


def test_a_suite_has_the_host_and_some_layers(tmp_path: Path) -> None:
    """What our engine runs is written, and nothing else in its place."""
    for name in ("config", "slurm"):
        (tmp_path / name).mkdir()
    (tmp_path / "slurm" / "frontier").symlink_to(CONFIG.root / "slurm" / "frontier")
    config = Config(tmp_path)
    write(candidate("zero1", ONLY_DATA, recomputed=0.5), "some", config)
    [run] = Config(tmp_path).runs(["some"])
    assert (run.recompute, run.recompute_layers, run.recomputed) == ("full", 6, tuple(range(6)))
    with pytest.raises(
        UserError, match="recompute_layers 5: 5 blocks are not equally many of each of 2 stages"
    ):
        write(candidate("zero1", PIPELINE, recomputed=5 / 12), "mine", config)
    assert not [*tmp_path.rglob("mine.yaml")]
    write(candidate("zero1", ONLY_DATA, beyond=Beyond("host")), "mine", config)
    assert Config(tmp_path).scheme("mine").model_dump()["optim"] == "world@host"
    write(candidate("zero1", ONLY_DATA, beyond=Beyond("host", share=0.5, stride=2)), "parts", config)
    assert Config(tmp_path).scheme("parts").model_dump()["offload"] == {"share": 0.5, "stride": 2}
    write(candidate("zero1", ONLY_DATA.model_copy(update={"context": 2})), "context", config)
    [run] = Config(tmp_path).runs(["context"])
    assert (run.context, run.context_attention) == (2, ONLY_DATA.context_attention)
    files = sorted(tmp_path.rglob("*.yaml"))
    with pytest.raises(UserError, match="'hier3' is taken"):  # a scheme without a file of its own
        write(candidate("zero1", ONLY_DATA), "hier3", config)
    there = candidate("zero1", ONLY_DATA)
    unknown = there.job.machine.model_copy(update={"name": "a-file-of-mine"})
    with pytest.raises(UserError, match="no cluster 'a-file-of-mine' for a suite"):
        write(replace(there, batches=replace(there.batches, machine=unknown)), "new", config)
    assert sorted(tmp_path.rglob("*.yaml")) == files
    late = Beyond.of(["optim@host"], late=True)
    write(candidate("zero1", ONLY_DATA, beyond=late), "late", config)
    assert Config(tmp_path).scheme("late").model_dump()["offload"] == {"late": True}
