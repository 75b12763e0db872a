"""Runs that end badly and are run again: nothing is lost, nothing is wrong, and the cause is known."""

import contextlib
import os
import signal
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from started import MODEL, begun, both_ended, ended, killed, launched, spec_file

from lowband.box.network import OWN, PLAIN, SHAPED
from lowband.errors import UserError
from lowband.run import train as module
from lowband.run import training_loop as loop
from lowband.run.train import train
from lowband.spec.lock import is_held
from lowband.spec.records import Environment, Outcome, StepRecord
from lowband.spec.run_folder import RunFolder
from tests.waiting import wait_for

STEPS = {"steps": 10, "checkpoint_every": 5, "model": MODEL}


def records(folder: RunFolder) -> list[tuple[object, ...]]:
    """What of each step does not depend on the machine."""
    return [(s.step, s.loss, s.grad_norm, s.sent) for s in folder.read_steps()]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    """An undisturbed run, for comparison."""
    folder = tmp_path_factory.mktemp("whole")
    assert train(spec_file(folder, **STEPS)).status == "ok"
    return RunFolder(folder)


def assert_same(folder: RunFolder, whole: RunFolder) -> None:
    outcomes = [Outcome.read_json(each.outcome) for each in (folder, whole)]
    assert [outcome.status for outcome in outcomes] == ["ok", "ok"]
    assert outcomes[0].weights_sha256 == outcomes[1].weights_sha256
    assert outcomes[0].sent == outcomes[1].sent
    assert records(folder) == records(whole)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A small disk."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=32m", "tmpfs", str(folder)]
    if subprocess.run(mount, capture_output=True, timeout=20).returncode:
        pytest.skip("a disk of its own needs root")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True, timeout=20)


def test_a_full_disk_is_the_cause_and_a_rerun_goes_on(disk: Path, whole: RunFolder) -> None:
    folder, path = RunFolder(disk), spec_file(disk, **STEPS)
    append = RunFolder.append_step

    def fill(self: RunFolder, record: StepRecord) -> None:
        if record.step == 8:
            wait_for(lambda: self.has_checkpoint)  # of step 5, which is written behind training
            with contextlib.suppress(OSError), (disk / "filler").open("wb", buffering=0) as file:
                while True:
                    file.write(bytes(4096))
        append(self, record)

    def prepare() -> None:
        RunFolder.append_step = fill  # type: ignore[method-assign]

    path.with_suffix(".stderr").symlink_to(disk.parent / "stderr")
    code, error = ended(begun(path, prepare), path)
    assert code == 1
    assert not folder.outcome.exists()
    printed = [line for line in error.splitlines() if line.startswith("lowband: ")]
    cause = f"rank 0: OSError: [Errno 28] No space left on device: '{folder.steps}'"
    assert printed == [f"lowband: {cause}", f"lowband: {folder.outcome}: No space left on device"]
    assert len(folder.whole_steps()) < 10
    (disk / "filler").unlink()
    assert train(path).resumed_from == 5
    assert_same(folder, whole)


def test_a_run_stopped_after_its_last_checkpoint_comes_to_its_end(tmp_path: Path, whole: RunFolder) -> None:
    """Also with other limits of time, which change no number."""
    folder, path = RunFolder(tmp_path), spec_file(tmp_path, **STEPS)

    def prepare() -> None:
        loop.outcome_of = lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL)

    assert ended(begun(path, prepare), path)[0] == 1
    assert Outcome.read_json(folder.outcome).status == "error"
    spec_file(tmp_path, **STEPS, time_limit_s=1234, peer_timeout_s=99)
    outcome = train(path)
    assert_same(folder, whole)
    assert outcome.resumed_from == 10
    assert (outcome.states, outcome.peak_memory_bytes_max) == ((), 0)  # of no step: nothing was measured


@pytest.mark.parametrize("damage", ["half", "lost", "behind"])
def test_a_damaged_folder_is_run_again(
    tmp_path: Path, whole: RunFolder, damage: str, capfd: pytest.CaptureFixture[str]
) -> None:
    """Half an outcome and half a record, as after a power cut; no records; fewer than checkpoints."""
    folder, path = RunFolder(tmp_path), spec_file(tmp_path, **STEPS)
    append = RunFolder.append_step

    def stay(self: RunFolder, record: StepRecord) -> None:
        if record.step == 8:
            threading.Event().wait()
        append(self, record)

    def prepare() -> None:
        RunFolder.append_step = stay  # type: ignore[method-assign]

    process = begun(path, prepare)
    wait_for(lambda: folder.has_checkpoint and folder.count_steps() == 7)
    killed(process)
    lines = folder.steps.read_bytes().splitlines(keepends=True)
    if damage == "half":
        folder.outcome.write_text('{"status": "er')
        folder.steps.write_bytes(b"".join(lines) + lines[-1][:40])
    elif damage == "lost":
        folder.steps.unlink()
    else:
        folder.steps.write_bytes(b"".join(lines[:2]))
    outcome = train(path)
    assert_same(folder, whole)
    assert (outcome.resumed_from == 0) == (damage != "half")
    assert ("the run starts over from step 0" in capfd.readouterr().err) == (damage != "half")


def test_a_second_run_of_a_folder_is_refused(tmp_path: Path) -> None:
    folder, path = RunFolder(tmp_path), spec_file(tmp_path, steps=100_000)
    first = begun(path)
    try:
        wait_for(lambda: folder.count_steps() > 2)
        before = {p: p.read_bytes() for p in (folder.spec, folder.env, folder.lock)}
        with pytest.raises(UserError, match=f"^{tmp_path}: is being run by process {first.pid} on "):
            train(path)
        assert {p: p.read_bytes() for p in before} == before
        taken = folder.count_steps()
        wait_for(lambda: folder.count_steps() > taken)
        assert len(folder.whole_steps()) > taken
        assert is_held(folder.lock)
    finally:
        killed(first)
    assert not folder.outcome.exists()
    wait_for(lambda: not is_held(folder.lock))


@pytest.mark.parametrize(
    ("order", "code", "cause"),
    [
        (signal.SIGINT, 130, "interrupted"),
        (
            signal.SIGTERM,
            143,
            "ended by SIGTERM: cancelled, out of its job's time, or another rank's death",
        ),
    ],
)
def test_an_order_to_end_is_one_line_and_an_outcome(
    tmp_path: Path, order: signal.Signals, code: int, cause: str
) -> None:
    folder, path = RunFolder(tmp_path), spec_file(tmp_path, steps=100_000)
    process = begun(path)
    wait_for(lambda: folder.count_steps() > 2)
    # A terminal sends Ctrl-C to all processes of a command.
    (os.killpg if order == signal.SIGINT else os.kill)(process.pid, order)
    assert ended(process, path) == (code, f"lowband: {cause}\n")
    outcome = Outcome.read_json(folder.outcome)
    assert (outcome.status, outcome.cause, outcome.steps > 2) == ("error", cause, True)


def out_of_memory() -> None:
    """Rank 1 fails in step 2, and rank 0 goes on waiting, as NCCL would: no connection breaks."""
    backward = loop._backward

    def full(rank: int, spec, corpus, trainer, step: int, device) -> torch.Tensor:
        if rank == 1 and step == 2:
            raise RuntimeError("NCCL error\nunhandled cuda error\nCuda failure 2 'out of memory'")
        if step == 2:
            threading.Event().wait()
        return backward(rank, spec, corpus, trainer, step, device)

    loop._backward = full


def test_all_launched_ranks_end_when_one_is_out_of_memory(tmp_path: Path) -> None:
    """Its exit code is 0, as it is a result: no launcher would end the others."""
    path = spec_file(tmp_path, ranks=2, steps=100)
    codes, errors = both_ended(launched(path, out_of_memory), path)
    assert codes == [0, 0], errors
    outcome = Outcome.read_json(RunFolder(tmp_path).outcome)
    assert (outcome.status, outcome.cause) == ("oom", "rank 1: RuntimeError: NCCL error")
    assert "rank 0 ends because another rank failed: rank 1: RuntimeError: NCCL error" in errors[0]


def refuse(*_: object, **__: object) -> None:
    raise UserError("refused on every rank")


def test_bad_input_that_every_rank_finds_is_printed_once(tmp_path: Path) -> None:
    def prepare() -> None:
        module.train_rank = refuse
        module.SEEN_S = 60  # until rank 0 has said so

    path = spec_file(tmp_path, ranks=2)
    codes, errors = both_ended(launched(path, prepare), path)
    assert codes == [1, 1], errors
    assert "".join(errors).splitlines() == ["lowband: rank 0: UserError: refused on every rank"]
    code, error = ended(begun(path, prepare), path)
    assert code == 1
    assert error.count("refused on every rank") == 1
    assert "Traceback" not in error


def test_launched_ranks_leave_another_jobs_folder_alone(tmp_path: Path) -> None:
    folder, path = RunFolder(tmp_path), spec_file(tmp_path, ranks=2, steps=100_000)
    first = begun(path)
    try:
        wait_for(lambda: folder.count_steps() > 2)
        second = launched(path)
        code, error = ended(second[0], path, RANK="0")
        assert code == 2
        assert f"is being run by process {first.pid} on" in error
        second[1].terminate()  # as a launcher does then
        assert ended(second[1], path, RANK="1")[0] not in (0, None)
        assert first.exitcode is None
        assert not folder.outcome.exists()
        assert folder.env.exists()
    finally:
        killed(first)


def test_a_run_that_has_ended_well_is_left_as_it_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, folder = spec_file(tmp_path, **STEPS), RunFolder(tmp_path)
    first = train(path)
    spec_file(tmp_path, **STEPS, time_limit_s=1234)
    assert train(path) == first == folder.read_outcome()
    assert "has ended already; `lowband train --again` trains it anew" in capsys.readouterr().err
    folder.trained.write_text("a checksum")
    again = train(path, again=True)
    assert (again.status, again.wall_s != first.wall_s) == ("ok", True)
    assert not folder.trained.exists()  # Snakemake's, of the run whose rows are lost
    assert train(path, links=f"{OWN}: another reason") == again
    assert train(path, links=PLAIN) != again and Environment.read_json(folder.env).links == PLAIN
    by = Environment.read_json(folder.env)
    for made, here in (
        ({"backend": "nccl"}, "nccl, and here is gloo"),
        ({"links": SHAPED}, f"{SHAPED}, and here is {PLAIN}"),
    ):
        folder.write_environment(by.model_copy(update=made))
        with pytest.raises(UserError, match=f"has ended on {here} .allowed: lowband train --again"):
            train(path, links=PLAIN)
    folder.write_environment(by)
    spec_file(tmp_path, **{**STEPS, "steps": 11})
    assert train(path).steps == 11


def test_every_attempt_is_known_by_where_it_began(tmp_path: Path) -> None:
    path = spec_file(tmp_path, **{**STEPS, "checkpoint_every": 2})
    append = RunFolder.append_step
    for last in (5, 9):

        def stop(self: RunFolder, record: StepRecord, last: int = last) -> None:
            append(self, record)
            if record.step == last:
                wait_for(lambda: any(self.checkpoints.glob(f"*/step-{last - 1:08}")))
                os.kill(os.getpid(), signal.SIGKILL)

        def prepare(stop=stop) -> None:
            RunFolder.append_step = stop  # type: ignore[method-assign]

        assert ended(begun(path, prepare), path)[0] == 1
    outcome = train(path)
    assert outcome.status == "ok" and outcome.begins[0] == 0 and len(outcome.begins) == 3
    assert outcome.begins[-1] == outcome.resumed_from
    assert list(outcome.begins) == sorted(outcome.begins)
