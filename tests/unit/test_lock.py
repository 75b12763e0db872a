"""One training per run folder, by the kernel's lock."""

import errno
import fcntl
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from lowband.errors import UserError
from lowband.spec import lock
from lowband.spec.lock import hold, is_held, job_of


def test_a_lock_of_other_bytes_names_no_job(tmp_path: Path) -> None:
    (tmp_path / "run.lock").write_bytes(b"process \xff\njob\xff\n")
    assert job_of(tmp_path / "run.lock") == "job\ufffd"
    (tmp_path / "run.lock").write_bytes(b"")
    assert job_of(tmp_path / "run.lock") is None


HOLDER = """
import os, sys
from pathlib import Path
from lowband.spec.lock import hold
with hold(Path(sys.argv[1]), "job 7"):
    if len(sys.argv) > 2 and os.fork():
        os._exit(0)
    print(os.getpid(), flush=True)
    sys.stdin.read()
"""


def holder(path: Path, *arguments: str) -> tuple[subprocess.Popen[str], int]:
    """A process that holds the lock until it is killed, and the number of the last one forked from it."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(path), *arguments],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stdout is not None
    return process, int(process.stdout.readline())


def test_the_second_is_refused_until_the_first_is_gone(tmp_path: Path) -> None:
    path = tmp_path / "run.lock"
    assert not is_held(path)
    process, _ = holder(path)
    try:
        for _ in range(2):
            assert is_held(path)
            with pytest.raises(UserError) as refused, hold(path):
                pass
        expected = f"{tmp_path}: is being run by process {process.pid} on {socket.gethostname()}"
        assert str(refused.value) == expected
        assert job_of(path) == "job 7"
    finally:
        process.kill()
        process.wait()
    assert not is_held(path)
    with hold(path, "8"):
        assert is_held(path)
        assert job_of(path) == "8"
    assert not is_held(path)


def test_a_lock_that_may_not_be_read_leaves_the_state_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "run.lock").touch(mode=0)

    def refuses(path: Path, flags: int) -> int:  # root may read all
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr("lowband.spec.lock.os.open", refuses)
    assert is_held(tmp_path / "run.lock")


def test_a_rank_holds_its_launchers_lock(tmp_path: Path) -> None:
    path = tmp_path / "run.lock"
    process, forked = holder(path, "fork")
    try:
        assert process.wait(300) == 0
        assert is_held(path)
    finally:
        os.kill(forked, signal.SIGKILL)
    with path.open() as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # waits until the kernel has ended it
    assert not is_held(path)


def test_looking_at_a_lock_refuses_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "run.lock"
    with hold(path):
        pass
    fd = os.open(path, os.O_RDONLY)
    fcntl.flock(fd, fcntl.LOCK_SH)  # as `is_held` for a moment
    slept = []

    def looked(seconds: float) -> None:
        slept.append(seconds)
        if len(slept) == 3:
            os.close(fd)

    monkeypatch.setattr(lock.time, "sleep", looked)
    monkeypatch.setattr(lock.time, "monotonic", lambda: sum(slept))
    with hold(path):
        assert len(slept) == 3


def test_patience_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A lock that is held is tried for a second; the clock of this test has no further times."""
    path, slept = tmp_path / "run.lock", list[float]()
    monkeypatch.setattr(lock.time, "sleep", slept.append)
    monkeypatch.setattr(lock.time, "monotonic", iter([5.0, 5.5, 5.9, 6.1]).__next__)
    with hold(path):
        monkeypatch.setattr(lock.time, "monotonic", iter([5.0, 5.5, 5.9, 6.1]).__next__)
        with pytest.raises(UserError, match=f"is being run by process {os.getpid()} on"), hold(path):
            pass
    assert len(slept) == 2


def test_a_file_system_without_locks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.EOPNOTSUPP, "Operation not supported")

    monkeypatch.setattr(fcntl, "flock", refuse)
    path = tmp_path / "run.lock"
    with hold(path, "job"):
        assert is_held(path)  # unknown, so not reported as dead
        assert job_of(path) == "job"
    [line] = capsys.readouterr().err.splitlines()
    assert str(path) in line


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"none/run\.lock"), hold(tmp_path / "none" / "run.lock"):
        pass
