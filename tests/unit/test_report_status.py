"""What a reproduction that is under way says of itself."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from report_runs import smoke_specs, write_failure, write_run

from lowband.__main__ import main
from lowband.run import status as status_of
from lowband.run.status import duration, follow, headline, read_status, report, suites_of
from lowband.spec.lock import hold
from lowband.spec.records import Outcome, Slow, Slowest
from lowband.spec.run_folder import RunFolder
from tests.checkout import ROOT


@pytest.fixture
def under_way(tmp_path: Path) -> Iterator[Path]:
    """Nine runs: two ok of 10 s, one out of memory, one after 3 of its 6 steps, the others not begun.

    The running one's lock is held by this process.
    """
    for part in ("config", "slurm"):
        (tmp_path / part).symlink_to(ROOT / part)
    runs = tmp_path / "results" / "local" / "runs"
    first, second, failed, running = smoke_specs()[:4]
    for spec in (first, second):
        outcome = write_run(runs, spec, 1, 5) / "outcome.json"
        outcome.write_text(Outcome(status="ok", steps=6, wall_s=10).to_json())
    write_failure(runs, failed, Outcome(status="oom", cause="not enough memory", steps=0, wall_s=10))
    folder = write_run(runs, running, 1, 5)
    (folder / "outcome.json").unlink()
    steps = folder / "steps.jsonl"
    steps.write_text("".join(steps.read_text().splitlines(keepends=True)[:3]))
    with hold(folder / "run.lock"):
        yield tmp_path


def test_counts_causes_and_time_left(under_way: Path) -> None:
    status = read_status(under_way, "local", ["smoke"])
    assert headline(status) == "9 runs: 2 ok, 1 failed, 1 running, 5 waiting; left: 55 s"
    text = report(status)
    assert "50% of its steps" in text
    assert "oom, not enough memory" in text


def test_a_folder_names_its_suites(under_way: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """config.yaml asks for other suites than `make smoke` has run."""
    (under_way / "results" / "local").rename(under_way / "results" / "smoke")
    assert suites_of(under_way, "smoke") == ["smoke"]
    assert main(["status", "--results", "smoke", "--root", str(under_way)]) == 0
    assert capsys.readouterr().out.startswith("9 runs: 2 ok, 1 failed")
    assert main(["status", "--results", "nothing", "--root", str(under_way)]) == 2
    assert capsys.readouterr().err.endswith("nothing: has no runs (allowed: local, smoke)\n")


@pytest.mark.parametrize("outcome", [None, '{"status": "ok", "st'])
def test_a_run_that_nobody_runs_and_that_has_no_outcome_has_died(
    under_way: Path, outcome: str | None
) -> None:
    """As after SIGKILL of its launcher or a power cut; half an outcome is none."""
    running = read_status(under_way, "local", ["smoke"]).of("running")[0].run_id
    died, locked = smoke_specs()[4:6]
    runs = under_way / "results" / "local" / "runs"
    folder = write_run(runs, died, 1, 5)
    (folder / "outcome.json").unlink()
    if outcome is not None:
        (folder / "outcome.json").write_text(outcome)
    (runs / locked.run_id).mkdir()
    (runs / locked.run_id / "run.lock").touch()  # killed before it wrote anything
    status = read_status(under_way, "local", ["smoke"])
    assert [run.run_id for run in status.of("running")] == [running]
    assert {run.run_id for run in status.of("died")} == {died.run_id, locked.run_id}
    assert headline(status).startswith("9 runs: 2 ok, 3 failed, 1 running, 3 waiting; ")
    assert f"{died.run_id}: died, it stopped without an outcome" in report(status)


def test_time_is_not_guessed(tmp_path: Path) -> None:
    assert "left: unknown" in headline(read_status(ROOT, "nothing-here", ["smoke"]))


def test_a_log_gets_a_line_per_change(
    under_way: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    looks = 0

    def meanwhile(_seconds: float) -> None:
        """Nothing at the first look; at the second all runs have ended."""
        nonlocal looks
        looks += 1
        if looks == 2:
            for spec in smoke_specs():
                write_run(under_way / "results" / "local" / "runs", spec, 1, 5)

    monkeypatch.setattr(status_of.time, "sleep", meanwhile)
    follow(under_way, "local", ["smoke"])
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2
    assert lines[1].endswith("9 runs: 9 ok; all ended")


@pytest.mark.parametrize(("seconds", "said"), [(0, "0 s"), (59, "59 s"), (61, "1 min"), (7500, "2 h 05 min")])
def test_durations(seconds: float, said: str) -> None:
    assert duration(seconds) == said


def test_it_shows_what_is_slow(under_way: Path) -> None:
    """Of a run that has ended, by its outcome; of one under way, by the records of its steps so far."""
    runs = under_way / "results" / "local" / "runs"
    done, _, _, running = smoke_specs()[:4]
    slow = Slow(level="self", ranks=(5,), times=1.8, compared=8, steps=12, of_steps=14)
    (runs / done.run_id / "outcome.json").write_text(
        Outcome(status="ok", steps=6, wall_s=10, slow=(slow,)).to_json()
    )
    [first] = RunFolder(runs / running.run_id).whole_steps()[:1]
    one = Slowest(level="node", ranks=(0, 2), seconds=0.3, median_s=0.1, compared=4)
    (runs / running.run_id / "steps.jsonl").write_text(
        "".join(
            first.model_copy(update={"step": step, "slowest": (one,)}).model_dump_json() + "\n"
            for step in range(1, 21)
        )
    )
    text = report(read_status(under_way, "local", ["smoke"]))
    assert text.splitlines()[-3:] == [
        "slow ranks and links:",
        f"  {done.run_id}: rank 5 computes 1.8 times as long as the median of 8 ranks in 12 of 14 steps",
        f"  {running.run_id}: the messages between ranks 0 and 2 (level node) take 3.0 times as long as the "
        f"median of 4 in {20 - running.warmup_steps} of {20 - running.warmup_steps} steps",
    ]
