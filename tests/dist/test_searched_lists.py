"""Lists made for slow sends train as one process does; the benchmark of schedules records what ran."""

from functools import partial

import pytest
import torch
from staged import alone, chain, on_axes, whole

import lowband
from lowband.run import paced_pipelines
from lowband.run.on_ranks import on_ranks
from lowband.spec.mesh import Levels
from lowband.spec.schedule import stages

RANKS, MICRO_BATCHES = 2, 5


@pytest.mark.parametrize("send", [0.1, 1.0])
def test_bits_are_those_of_one_process(send: float) -> None:
    of_it = lowband.lists_for_sends(RANKS, MICRO_BATCHES, 1.0, 1.0, 0.5, send)
    modules = partial(chain, 2)
    found = on_ranks(RANKS, partial(on_axes, schedule=of_it), {}, RANKS, "zero3", MICRO_BATCHES, modules)
    [expected] = on_ranks(1, alone, modules, MICRO_BATCHES, Levels.fit({}, 1))
    [losses] = [one.losses for one in found if any(one.losses)]
    assert losses == expected.losses
    state = whole(found)
    assert state.keys() == expected.state.keys()
    assert [key for key in state if not torch.equal(state[key], expected.state[key])] == []


def test_every_action_of_every_schedule_is_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    """In its order on each rank, beside the timeline of the same lists; how long it took is the machine's."""
    monkeypatch.setattr(paced_pipelines, "NAMED", (("1f1b", 1), ("zb-v", 2)))
    steps, ends = paced_pipelines.measure(0.001, (0.5,), steps=1)
    given = paced_pipelines.schedules(0.5)
    assert [row.schedule for row in steps] == list(given) == ["1f1b", "zb-v", "searched"]
    for row, (name, of_it) in zip(steps, given.items(), strict=True):
        assert row.step_s > 0
        assert row.bubble == pytest.approx(1 - 3 * 0.001 * row.micro_batches / row.step_s)
        for rank, of_rank in enumerate(of_it):
            mine = [end for end in ends if (end.schedule, end.rank) == (name, rank)]
            assert [(end.kind, end.stage, end.micro_batch) for end in mine] == [tuple(a) for a in of_rank]
            assert [end.end_s for end in mine] == sorted(end.end_s for end in mine)
            share = paced_pipelines.RANKS / stages(of_it)
            assert {end.seconds for end in mine if end.kind == "forward"} == {0.001 * share}
        last = max(end.end_s for end in ends if end.schedule == name)
        assert last == pytest.approx(row.step_s)
        predicted = max(end.predicted_end_s for end in ends if end.schedule == name)
        assert predicted == pytest.approx(row.predicted_step_s)
