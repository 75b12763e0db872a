"""`lowband rehearse`: what the runs of a suite ask for, and whether they fit."""

import json
from dataclasses import replace

import pytest

from lowband.errors import UserError
from lowband.evidence.claims.rehearsed import suite_stacks
from lowband.predict.defaults import with_defaults
from lowband.predict.prediction import predict
from lowband.predict.request import Grid
from lowband.predict.search.rehearsal import rehearse, text
from lowband.predict.workload import workload_of
from tests.checkout import CONFIG
from tests.printed import printed_by

FRONTIER = CONFIG.runs(["frontier"])
JOB = CONFIG.job("frontier")


def test_node_hours_by_hand() -> None:
    """3 repeats of 6 steps on 2 nodes; as jobs of their own, 25 + 10 minutes each."""
    rows = rehearse(FRONTIER, JOB)
    ours = [spec for spec in FRONTIER if spec.repeat == 1 and spec.engine == "lowband"]
    assert [row.run for row in rows] == [spec.run_id.removesuffix("-r1") for spec in ours]
    assert {(row.minutes, row.node_hours) for row in rows} == {(None, None)}  # they share jobs
    alone = rehearse(FRONTIER, JOB.model_copy(update={"job_of": "run"}))
    assert [row.node_hours for row in alone] == pytest.approx([3 * row.ranks / 8 * 35 / 60 for row in rows])
    job = workload_of(FRONTIER[0])
    machine, stack = with_defaults(job.machine, job.stack)
    first = predict(replace(job, machine=machine, stack=stack))
    assert (rows[0].step_s, rows[0].fits) == (first.step_time_s, True)
    assert rows[0].steps_hours == pytest.approx(3 * 2 * 6 * first.step_time_s / 3600)


def test_peers_are_predicted_with_their_stack() -> None:
    """DeepSpeed's ZeRO-3 without overlap takes as long as ours with its rings, shares and fixed times."""
    stacks = suite_stacks(CONFIG, FRONTIER)
    rows = rehearse(FRONTIER, JOB, stacks)
    theirs = [row for row in rows if row.stack == "deepspeed-zero"]
    assert len(theirs) == len({s.run_id for s in FRONTIER if s.engine == "deepspeed" and s.repeat == 1}) > 0
    spec = next(s for s in FRONTIER if s.engine == "deepspeed")
    grid = Grid(CONFIG, "frontier", ["gpt-20b"], [spec.scheme.name], [16], [1], [1], [2048], ["full"])
    assert theirs[0].step_s == pytest.approx(grid.records()[0]["step_time_s"])


def test_a_checkpoint_is_divided_over_all_ranks_whatever_their_axes() -> None:
    """But for padding, and for the root, which the first stage has."""
    alone = rehearse([FRONTIER[0].model_copy(update={"ranks": 384, "scheme": CONFIG.scheme("zero3")})], JOB)[
        0
    ]
    for axes in ({"tensor": 8}, {"pipeline": 4}, {"tensor": 4, "pipeline": 2}):
        spec = FRONTIER[0].model_copy(update={"ranks": 384, "scheme": CONFIG.scheme("zero3"), **axes})
        [row] = rehearse([spec], JOB)
        assert row.checkpoint_s == pytest.approx(alone.checkpoint_s, rel=0.15)
        assert row.resume_s == pytest.approx(alone.resume_s, rel=0.15)


def test_a_run_without_overlap_is_predicted_without() -> None:
    same = {"accumulation": 4, "collectives": "flat"}
    times = [
        rehearse([FRONTIER[0].model_copy(update={**same, "overlap": overlap})], JOB)[0].step_s
        for overlap in (True, False)
    ]
    assert times[0] < times[1]


def test_the_whole_machine() -> None:
    """9,408 nodes of 8 GCDs; more nodes than the largest queue takes are refused."""
    whole = FRONTIER[0].model_copy(update={"ranks": 9408 * 8})
    [row] = rehearse([whole], JOB)
    assert (row.nodes, row.fits) == (9408, True)
    with pytest.raises(UserError, match="9857 nodes"):
        rehearse([whole.model_copy(update={"ranks": 9857 * 8})], JOB)


def test_the_command_prints_what_was_predicted(capsys: pytest.CaptureFixture[str]) -> None:
    root = ["--root", str(CONFIG.root)]
    found = json.loads(printed_by(capsys, "rehearse", "--suite", "frontier", "--json", *root))
    assert {row["provenance"] for kind in ("runs", "ratios") for row in found[kind]} == {"predicted"}
    printed = printed_by(capsys, "rehearse", "--suite", "frontier", *root)
    assert "on 48 nodes 120 runs follow each other in a job of 120 minutes, and in further ones" in printed
    assert "12 of 18 cells can decide hier3-over-zeropp; with the fewest node-hours: 4 passes" in printed
    assert "node-hours asked for" in printed_by(capsys, "rehearse", "--suite", "cuda", *root)


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
