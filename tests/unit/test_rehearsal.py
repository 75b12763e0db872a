"""`lowband rehearse`: what the runs of a suite ask for, and whether they fit."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from lowband.__main__ import main
from lowband.errors import UserError
from lowband.predict.defaults import with_defaults
from lowband.predict.prediction import predict
from lowband.predict.search.rehearsal import rehearse, text
from lowband.predict.workload import workload_of
from lowband.spec.config import Config

CONFIG = Config(Path(__file__).parents[2])
FRONTIER = CONFIG.runs(["frontier"])
JOB = CONFIG.job("frontier")


def test_node_hours_by_hand() -> None:
    """3 schemes, 3 repeats, 2, 12 and 48 nodes, 25 + 10 minutes."""
    rows = rehearse(FRONTIER, JOB)
    assert len(rows) == 9
    assert sum(row.node_hours or 0 for row in rows) == pytest.approx(9 * (2 + 12 + 48) * 35 / 60)
    job = workload_of(FRONTIER[0])
    machine, stack = with_defaults(job.machine, job.stack)
    first = predict(replace(job, machine=machine, stack=stack))
    assert (rows[0].step_s, rows[0].fits) == (first.step_time_s, True)
    assert rows[0].steps_hours == pytest.approx(3 * 2 * 15 * first.step_time_s / 3600)


def test_the_whole_machine() -> None:
    """9,408 nodes of 8 GCDs; more nodes than the largest queue takes are refused."""
    whole = FRONTIER[0].model_copy(update={"ranks": 9408 * 8})
    [row] = rehearse([whole], JOB)
    assert (row.nodes, row.fits) == (9408, True)
    with pytest.raises(UserError, match="9857 nodes"):
        rehearse([whole.model_copy(update={"ranks": 9857 * 8})], JOB)


def test_the_command_prints_what_was_predicted(capsys: pytest.CaptureFixture[str]) -> None:
    root = ["--root", str(CONFIG.root)]
    assert main(["rehearse", "--suite", "frontier", "--json", *root]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert {row["provenance"] for row in rows} == {"predicted"}
    assert main(["rehearse", "--suite", "frontier", *root]) == 0
    assert "325.5 node-hours asked for" in capsys.readouterr().out


def test_checkpoints_are_in_what_is_printed() -> None:
    [row] = rehearse(FRONTIER[:1], JOB)
    assert row.checkpoint_s is not None
    seconds = f"{row.checkpoint_s:.1f} to {row.checkpoint_s:.1f} s to write"
    assert f"a checkpoint of {row.checkpoint_gib:.0f} GiB: {seconds}" in text([row])
    machine = FRONTIER[0].machine.model_copy(update={"storage": None})
    assert "a checkpoint of" not in text(rehearse([FRONTIER[0].model_copy(update={"machine": machine})], JOB))


def test_a_run_that_does_not_fit() -> None:
    small = FRONTIER[0].machine.device.model_copy(update={"memory_gib": 20.0})
    machine = FRONTIER[0].machine.model_copy(update={"device": small})
    [row] = rehearse([FRONTIER[0].model_copy(update={"machine": machine})], JOB)
    assert row.fits is False


@pytest.mark.parametrize(("suite", "words"), [("box", "of a box"), ("volume", "counted, not trained")])
def test_what_cannot_be_rehearsed_is_refused(suite: str, words: str) -> None:
    with pytest.raises(UserError, match=words):
        rehearse(CONFIG.runs([suite]), None)


def test_what_bounds_a_step_is_its_largest_item() -> None:
    """Products on the machine as it is, an exchange where its outer link is 1,000 times slower."""
    seen = []
    for share in (1, 1e-3):
        run = FRONTIER[0].model_copy(update={"machine": FRONTIER[0].machine.with_outer_link(share)})
        [row] = rehearse([run], JOB)
        job = workload_of(run)
        machine, stack = with_defaults(job.machine, job.stack)
        found = predict(replace(job, machine=machine, stack=stack)).time_s
        times = {name: float(t) for name, t in found.items()}
        products = sum(times.pop(name) for name in ("forward", "recompute", "backward"))
        largest = sorted(times, key=lambda name: times[name])[-1]
        assert row.bound_by == ("products" if products >= times[largest] else largest)
        seen.append(row.bound_by)
    assert seen[0] == "products" != seen[1]
