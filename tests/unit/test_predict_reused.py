"""Weights that DeepSpeed keeps gathered from forward to backward, as its coordinator finds them."""

from dataclasses import replace

import pytest
from test_command_rows import jobs

from lowband.cost.bytes import stage_numels
from lowband.cost.lora import Lora
from lowband.cost.tiers import Beyond
from lowband.evidence.validation import SOURCES
from lowband.predict.place import alike, gathered_block, reused
from lowband.predict.prediction import predict
from lowband.predict.request import setting
from lowband.predict.workload import Workload
from lowband.spec.axes import Ways
from lowband.spec.scheme import Scheme
from lowband.spec.sourced import Fact
from tests.checkout import CONFIG

GPT = "gpt-10b"


def job(elements: float | None, scheme: str = "zero3", **more: object) -> Workload:
    machine, stack = setting(CONFIG, "dgx2", "deepspeed-zero")
    fact = None if elements is None else Fact(value=elements, source="asked")
    placed = CONFIG.scheme(scheme).on(list(machine.sizes))
    values = {"micro_batch": 1, "seq_len": 1024, "accumulation": 2} | more
    told = stack.model_copy(update={"reused": fact})
    return Workload(machine, told, CONFIG.model(GPT), placed, 32, **values)  # type: ignore[arg-type]


def unhidden(one: Workload) -> Workload:
    none = Fact(value=0.0, source="asked")
    return replace(one, stack=one.stack.model_copy(update={"overlap": none}))


def by_trace(one: Workload, limit: float) -> int:
    """Module by module, as DeepSpeed's `__params_to_release` walks on from each block's forward: a recomputed
    block runs forward again before its backward."""
    block = stage_numels(one.model, one.levels, one.axes)[1]
    head = one.model.vocab * one.model.hidden
    forward = [(f"{i}", block) for i in range(one.model.layers)] + [("head", head)]
    backward = [each for each in forward[-2::-1] for _ in range(2 if one.recompute == "full" else 1)]
    trace, kept = [*forward, forward[-1], *backward], 0
    for place, (name, _) in enumerate(forward[:-1]):
        traversed = 0
        for later, numel in trace[place + 1 :]:
            if traversed >= limit:
                break
            if later == name:
                kept += 1
                break
            traversed += numel
    return kept


@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("limit", [1.0, 4e8, 1e9, 3e9, 1e10, 1e13, "a whole number of blocks"])
def test_blocks_that_stay_are_those_of_deepspeeds_walk(limit: float | str, recompute: str) -> None:
    one = job(1.0, recompute=recompute)
    if isinstance(limit, str):
        block = stage_numels(one.model, one.levels, one.axes)[1]
        limit = 2 * one.model.vocab * one.model.hidden + 3 * (3 if recompute == "full" else 2) * block
    one = job(limit, recompute=recompute)
    assert reused(one, alike(one)) == by_trace(one, limit)


def test_what_stays_is_gathered_once_and_held() -> None:
    """In a step of two micro-batches the backward gathers the other blocks alone."""
    none, some, everything = (job(limit) for limit in (None, 4e9, 1e13))
    stay, layers = by_trace(some, 4e9), some.model.layers
    assert 0 < stay < layers
    lanes = [predict(one).communication_s for one in (none, some, everything)]
    whole = float(lanes[0]["backward_gather"])
    assert float(lanes[1]["backward_gather"]) == pytest.approx(whole * (1 - stay / layers), rel=1e-9)
    assert float(lanes[2].get("backward_gather", 0.0)) == 0
    assert all(lane["forward_gather"] == lanes[0]["forward_gather"] for lane in lanes)
    root, block, *_ = stage_numels(some.model, some.levels, some.axes)
    assert predict(some).memory_bytes["gathered"] == 2 * (root + stay * block)
    assert predict(everything).memory_bytes["gathered"] == 2 * (root + layers * block)


def test_what_stays_is_not_fetched_from_the_host() -> None:
    """Neither where a job has its weights there, nor where its scheme has, with some that stay there, too."""
    places = [{"beyond": Beyond.of(["weights@host"])}, {}, {}]
    stay = by_trace(job(4e9), 4e9)
    for more, resident in zip(places, (0.0, 0.0, 0.3), strict=True):
        jobs = [job(limit, **more) for limit in (None, 4e9, 1e13)]
        if not more:
            there = jobs[0].scheme.model_dump() | {"weights": "world@host", "resident": resident}
            jobs = [replace(one, scheme=Scheme.model_validate(there)) for one in jobs]
        none, some, everything = (predict(unhidden(one)) for one in jobs)
        root, block, *_ = stage_numels(jobs[0].model, jobs[0].levels, jobs[0].axes)
        assert some.memory_bytes["gathered"] == 2 * (root + stay * block)
        assert float(everything.time_s["stash"]) == 0 < float(some.time_s["stash"])
        if not resident:
            left = 1 - stay / jobs[0].model.layers
            assert some.time_s["stash"] == pytest.approx(float(none.time_s["stash"]) * left, rel=1e-9)
        else:
            assert some.time_s["stash"] < none.time_s["stash"]


def test_beside_adapters_each_block_is_gathered_again() -> None:
    adapted = [predict(job(limit, lora=Lora(16))) for limit in (None, 1e13)]
    assert adapted[0].time_s == adapted[1].time_s and adapted[0].memory_bytes == adapted[1].memory_bytes


def test_of_experts_those_that_are_gathered_are_held() -> None:
    """Each of 8 ranks has one of Mixtral's eight experts whole, on 16 ranks a half of it."""
    for ranks, has in ((8, 0), (16, 1)):
        machine, stack = setting(CONFIG, "dgx-h100", "deepspeed-zero")
        told = stack.model_copy(update={"reused": Fact(value=1e13, source="asked")})
        scheme = CONFIG.scheme("zero3").on(list(machine.sizes))
        one = Workload(
            machine, told, CONFIG.model("mixtral-8x7b"), scheme, ranks, 1, 1024, 2, axes=Ways.of_options(ep=8)
        )
        place = alike(one)
        assert gathered_block(one, place) == place.numels[-1] + has * place.experts and place.experts > 0
        held = place.numels[0] + one.model.layers * gathered_block(one, place)
        assert predict(one).memory_bytes["gathered"] == 2 * held


def test_where_one_matrix_is_all_that_may_live_something_is_hidden() -> None:
    """DeepSpeed would gather nothing ahead at 530B, whose MLP has matrices of 4 x 20,480^2: with nothing
    hidden, the published rows are further off."""
    found = []
    for _, _, of_row in jobs(SOURCES["megatron-zero3"]):
        [one] = of_row
        if 4 * one.model.hidden**2 > 1e9:
            found.append([float(predict(each).hfu_tflops_per_gpu) for each in (one, unhidden(one))])
    published = [138, 98, 48]  # TFLOPS, as reported/07_megatron_sc21_2104.04473.csv has them
    off = [sum(abs(each[i] / real - 1) for each, real in zip(found, published, strict=True)) for i in (0, 1)]
    assert off[0] < off[1]


def test_nothing_stays_where_nothing_is_gathered() -> None:
    shards_states_alone = job(1e13, "zero1")
    assert reused(shards_states_alone, alike(shards_states_alone)) == 0
    as_shipped = replace(job(None), stack=CONFIG.stack_on("deepspeed-zero", "dgx2"))
    assert reused(as_shipped, alike(as_shipped)) > 0
