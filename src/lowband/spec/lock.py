"""One training per run folder, by a lock that the kernel releases when its holder ends, however it ends.

The lock is `flock` on a file that names its holder and is never removed: one process could lock the removed
file while another locks its successor. On a shared file system it holds for all hosts, unless the system
is mounted with locks of each host's own (Lustre's `localflock`): then neither a training nor `lowband status`
sees a holder on another host.
"""

import errno
import fcntl
import os
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from lowband.errors import UserError
from lowband.spec.files import naming

PATIENCE_S = 1.0  # `is_held` takes the lock for a moment; a training outlasts that
_UNSUPPORTED = {errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP}


@contextmanager
def hold(path: Path, job: str = "") -> Iterator[None]:
    """Hold the lock; forked processes inherit it, so it lasts as long as any of them lives.

    job: the job's id, by which the launcher's other processes recognise it (`job_of`)
    Raises UserError, naming the holder, if another process has it. Where the file system has no locks,
    nothing is held and a line on stderr reports it.
    """
    with naming(path):
        fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            _lock(fd, path)
            os.ftruncate(fd, 0)
            os.pwrite(fd, f"process {os.getpid()} on {socket.gethostname()}\n{job}\n".encode(), 0)
        except BaseException:
            os.close(fd)
            raise
    try:
        yield
    finally:
        os.close(fd)


def _lock(fd: int, path: Path) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while True:
        try:
            return fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() < deadline:
                time.sleep(0.05)
                continue
            holder = os.pread(fd, 1000, 0).decode(errors="replace").partition("\n")[0]
            raise UserError(f"is being run by {holder}", where=path.parent) from None
        except OSError as error:
            if error.errno not in _UNSUPPORTED:
                raise
            sys.stderr.write(
                f"lowband: {path}: no locks on this file system; a second run of the folder is not refused\n"
            )
            return None


def is_held(path: Path) -> bool:
    """Whether a process holds the lock; True also where that cannot be known."""
    try:
        fd = os.open(path, os.O_RDONLY)
    except FileNotFoundError:
        return False
    except PermissionError:
        return True
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(fd)
    return False


def job_of(path: Path) -> str | None:
    """The job of the last holder; None if there was none."""
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except FileNotFoundError:
        return None
    return lines[1] if len(lines) > 1 else None
