"""What a crash, a full disk or a lost file leaves in a run folder, and what a rerun makes of it."""

import json
from pathlib import Path

import pytest
from report_runs import smoke_specs, write_run

from lowband.errors import UserError
from lowband.spec.records import Outcome, mean
from lowband.spec.run_folder import RunFolder

CHECKPOINTS = (2, 4)


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    """A run that died after 5 steps, with checkpoints of steps 2 and 4."""
    run = RunFolder(write_run(tmp_path, smoke_specs()[0], 1, 5))
    run.outcome.unlink()
    run.steps.write_bytes(b"".join(run.steps.read_bytes().splitlines(keepends=True)[:5]))
    for step in CHECKPOINTS:
        (run.checkpoints / "a-spec" / f"step-{step:08d}").mkdir(parents=True)
    return run


def checkpoints(folder: RunFolder) -> list[str]:
    return sorted(path.name for path in folder.checkpoints.glob("*/*"))


def lines(folder: RunFolder) -> list[bytes]:
    return folder.steps.read_bytes().splitlines(keepends=True)


HALF = b'{"step": 5, "step_ti'
ZEROS = b"\0" * 100


@pytest.mark.parametrize("tail", [b"", HALF, ZEROS, HALF + b"\n", b"\xff\n", b"{}\n", b"null\n"])
def test_whole_steps_end_where_a_line_is_not_the_next_record(folder: RunFolder, tail: bytes) -> None:
    whole = lines(folder)
    folder.steps.write_bytes(b"".join(whole[:4]) + tail + (whole[4] if tail.endswith(b"\n") else b""))
    assert [record.step for record in folder.whole_steps()] == [1, 2, 3, 4]
    assert folder.start() == ""
    folder.go_back_to(4)
    assert lines(folder) == whole[:4]
    assert checkpoints(folder) == ["step-00000002", "step-00000004"]


def test_a_record_without_its_end_of_line_is_not_whole(folder: RunFolder) -> None:
    """The next one would be appended to it."""
    folder.steps.write_bytes(folder.steps.read_bytes()[:-1])
    assert len(folder.whole_steps()) == 4
    assert folder.count_steps() == 4


@pytest.mark.parametrize(
    ("kept", "recorded", "left", "start"),
    [
        ([0, 1, 2], 3, ["step-00000002"], "from an earlier one"),  # the log lags behind
        ([0, 1, 3, 4], 2, ["step-00000002"], "from an earlier one"),  # a gap
        ([0, 1, 1, 2, 3, 4], 2, ["step-00000002"], "from an earlier one"),  # twice
        ([0], 1, [], "over from step 0"),
        ([], 0, [], "over from step 0"),
    ],
)
def test_checkpoints_ahead_of_the_records_are_removed(
    folder: RunFolder, kept: list[int], recorded: int, left: list[str], start: str
) -> None:
    whole = lines(folder)
    folder.steps.write_bytes(b"".join(whole[number] for number in kept))
    told = folder.start()
    assert told.startswith(f"{folder.steps}: has the records of {recorded} steps; ")
    assert told.endswith(start)
    assert checkpoints(folder) == left
    assert folder.has_checkpoint == bool(left)
    assert folder.steps.exists() == bool(left)
    assert folder.start() == ""


def test_records_that_are_gone(folder: RunFolder) -> None:
    folder.steps.unlink()
    assert "records of 0 steps" in folder.start()
    assert not folder.has_checkpoint


def test_going_back_drops_what_comes_after(folder: RunFolder) -> None:
    """Also another spec's checkpoints: records of this spec would otherwise become theirs."""
    other = folder.checkpoints / "b-spec" / "step-00000003"
    other.mkdir(parents=True)
    folder.go_back_to(2)
    assert [record.step for record in folder.read_steps()] == [1, 2]
    assert checkpoints(folder) == ["step-00000002"]
    with pytest.raises(UserError, match="records of 2 steps, the checkpoint of 4"):
        folder.go_back_to(4)


def test_a_cut_outcome_is_none(folder: RunFolder) -> None:
    whole = folder.write_outcome(Outcome(status="ok", steps=6)).to_json()
    for length in range(0, len(whole) - 2, 7):
        folder.outcome.write_text(whole[:length])
        assert folder.read_outcome() is None
    assert folder.start() == ""
    assert not folder.outcome.exists()
    assert checkpoints(folder) == ["step-00000002", "step-00000004"]


def test_the_first_outcome_stays(folder: RunFolder) -> None:
    first = folder.write_outcome(Outcome(status="error", cause="rank 3 was killed", steps=5))
    assert folder.write_outcome(Outcome(status="error", cause="rank 0 waited", steps=5)) == first
    assert folder.read_outcome() == first


@pytest.mark.parametrize("status", ["ok", "nan"])
def test_a_run_that_came_to_its_end_starts_over(folder: RunFolder, status: str) -> None:
    folder.write_outcome(Outcome.parse({"status": status, "steps": 6}, "test"))
    assert folder.start() == ""
    assert not folder.has_checkpoint
    assert not folder.steps.exists()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda whole: [*whole, HALF], r"steps\.jsonl:6: is not a step record"),
        (lambda whole: [*whole[:2], *whole[3:]], r"steps\.jsonl:3: is the record of step 4 .allowed: step 3"),
        (lambda whole: [whole[0], *whole], r"steps\.jsonl:2: is the record of step 1 .allowed: step 2"),
    ],
)
def test_readers_are_given_all_steps_or_none(folder: RunFolder, change, message: str) -> None:
    folder.steps.write_bytes(b"".join(change(lines(folder))))
    with pytest.raises(UserError, match=message):
        list(folder.read_steps())


def test_an_old_record_has_no_interface_count(folder: RunFolder) -> None:
    old = [{k: v for k, v in json.loads(line).items() if k != "interface_bytes"} for line in lines(folder)]
    folder.steps.write_text("".join(json.dumps(record) + "\n" for record in old))
    assert [record.interface_bytes for record in folder.read_steps()] == [None] * 5


def test_a_mean_is_an_int_where_it_is_whole() -> None:
    assert [(mean(total, 4), type(mean(total, 4))) for total in (0, 8, 9)] == [
        (0, int),
        (2, int),
        (2.25, float),
    ]
