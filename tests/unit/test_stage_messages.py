"""What stages wait for each other's messages: by the links between them, and a tied head's once a step."""

from dataclasses import replace
from itertools import pairwise

import pytest

from lowband.cost.collectives import Network
from lowband.predict.stage_messages import boundaries, exchange_s, sends_s, tied_s
from lowband.predict.time import step_time
from lowband.predict.workload import Workload, workload_of
from lowband.spec.suites import Suite, expand
from tests.checkout import CONFIG


def _job(**options: object) -> Workload:
    suite = Suite.parse(
        {
            "name": "stages", "purpose": "stages", "cluster": "frontier",
            "fixed": {
                "model": "gpt-600k", "scheme": "zero3", "ranks": 16, "seq_len": 64, "steps": 4,
                "compute_dtype": "bf16", "reduce_dtype": "bf16", "micro_batch": 2, "accumulation": 4,
                **options,
            },
        },
        "stages",
    )  # fmt: skip
    [spec] = expand(suite, CONFIG.machine("frontier"), CONFIG.model, CONFIG.scheme, CONFIG.root)
    return workload_of(spec)


def _network(job: Workload) -> Network:
    return Network(job.machine, job.stack, shards=False)


@pytest.mark.parametrize(("pipeline", "crossed"), [(2, [1]), (4, [2, 1]), (8, [6, 1])])
def test_neighbours_by_the_link_between_them(pipeline: int, crossed: list[int]) -> None:
    """Two nodes of 8: the ranks of the axis counted one by one."""
    job = _job(pipeline=pipeline)
    digits = job.mesh.along("pipeline")
    assert boundaries(digits) == crossed
    group, levels = job.mesh.group("pipeline", 0), job.mesh.levels("pipeline")
    found = [levels.common(a, b) for a, b in pairwise(group)]
    assert [found.count(digit.level) for digit in digits] == crossed


def test_the_slowest_link_decides_although_others_are_fast() -> None:
    job = _job(pipeline=4)
    assert {digit.level for digit in job.mesh.along("pipeline")} == {"node", "world"}
    slower = replace(job, faster={"world": 1 / 4})
    at_once, later = (exchange_s(each, replace(_network(job), faster=each.faster)) for each in (job, slower))
    assert at_once.mean < at_once.slowest
    moved = 2 * 2 * 2 * 64 * job.model.hidden
    more = 3 * moved / _network(job).rate("world")
    assert later.slowest - at_once.slowest == pytest.approx(more)
    assert later.mean - at_once.mean == pytest.approx(more / 3)


@pytest.mark.parametrize(
    ("options", "places"),
    [
        ({"pipeline": 4}, [0, 1, 2, 3]),
        ({"pipeline": 2, "schedule": "interleaved", "chunks": 2}, [0, 1, 0, 1]),
        ({"pipeline": 2, "schedule": "zb-v", "chunks": 2}, [0, 1, 1, 0]),
    ],
)
def test_a_message_behind_each_stage_takes_its_link(options: dict[str, object], places: list[int]) -> None:
    job = _job(model="gpt-240k" if "chunks" in options else "gpt-600k", **options)
    group, levels, network = job.mesh.group("pipeline", 0), job.mesh.levels("pipeline"), _network(job)
    moved = 2 * 2 * 64 * job.model.hidden
    for (here, there), found in zip(pairwise(places), sends_s(job, network), strict=True):
        level = levels.common(group[here], group[there]) if here != there else None
        seconds = network.base_s + network.latency_s(level) + moved / network.rate(level) if level else 0
        assert found == pytest.approx(seconds)


def test_only_a_stack_that_waits_adds_every_message() -> None:
    """Two ranks come back to their first one after one of a micro-batch's two messages."""
    job = replace(_job(pipeline=2, model="gpt-240k"), faster={"world": 1 / 100})
    waits = replace(job, stack=job.stack.with_options({"hidden_sends": "none"}))
    interleaved = replace(job, stack=job.stack.with_options({"hidden_sends": "interleaved"}))
    hidden, added = (step_time(each).items for each in (job, waits))
    assert hidden["pipeline_exchange"] == pytest.approx(added["pipeline_exchange"] / 2, rel=0.01)
    assert hidden["bubble"] < added["bubble"]
    assert step_time(interleaved).items == added


def test_a_tied_head_is_exchanged_once_a_step() -> None:
    job = _job(pipeline=2)
    network = _network(job)
    sent = 4 * job.model.vocab * job.model.hidden / 8
    fixed = network.base_s + network.latency_s("world")
    assert tied_s(job, network) == pytest.approx(fixed + sent / network.rate("world"))
    for other in (
        _job(pipeline=1),
        _job(pipeline=2, schedule="zb-v", chunks=2),
        _job(pipeline=2, model="gpt-240k"),
    ):
        assert tied_s(other, network) == 0
