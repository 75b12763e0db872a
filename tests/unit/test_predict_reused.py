"""Weights that DeepSpeed keeps gathered from forward to backward, as its coordinator finds them."""

from dataclasses import replace

import pytest

from lowband.cost.bytes import stage_numels
from lowband.predict.place import alike, reused
from lowband.predict.prediction import predict
from lowband.predict.request import setting
from lowband.predict.workload import Workload
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


def by_trace(one: Workload, limit: float) -> int:
    """Module by module, as DeepSpeed's `__params_to_release` walks on from each block's forward."""
    block = stage_numels(one.model, one.levels, one.axes)[1]
    head = one.model.vocab * one.model.hidden
    forward = [(f"{i}", block) for i in range(one.model.layers)] + [("head", head)]
    trace, kept = forward + forward[::-1], 0
    for place, (name, _) in enumerate(forward[:-1]):
        traversed = 0
        for later, numel in trace[place + 1 :]:
            if traversed >= limit:
                break
            kept += later == name
            traversed += numel
    return kept


@pytest.mark.parametrize("limit", [1.0, 4e8, 1e9, 3e9, 1e10, 1e13])
def test_blocks_that_stay_are_those_of_deepspeeds_walk(limit: float) -> None:
    one = job(limit)
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


def test_nothing_stays_where_nothing_is_gathered() -> None:
    shards_states_alone = job(1e13, "zero1")
    assert reused(shards_states_alone, alike(shards_states_alone)) == 0
    as_shipped = replace(job(None), stack=CONFIG.stack_on("deepspeed-zero", "dgx2"))
    assert reused(as_shipped, alike(as_shipped)) > 0
