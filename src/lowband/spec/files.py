"""Files written atomically: whole or not at all. Needs only the standard library."""

import os
import socket
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def write_whole(path: Path, text: str) -> None:
    """Write a file atomically: it appears whole or not at all. An OSError names the file."""
    with _temporary(path, text) as temporary:
        temporary.replace(path)


def create_whole(path: Path, text: str) -> bool:
    """Write a file unless it exists; of several writers the first wins. Returns whether it was this one."""
    with _temporary(path, text) as temporary:
        try:
            path.hardlink_to(temporary)
        except FileExistsError:
            return False
        except OSError:  # a file system without hard links
            if path.exists():
                return False
            temporary.replace(path)
    return True


def remove_unfinished(folder: Path) -> None:
    """Remove the temporary files of writers that were killed. Nobody may be writing into `folder`."""
    for path in folder.glob(".*.tmp"):
        path.unlink(missing_ok=True)


def write_if_changed(path: Path, text: str) -> None:
    """Write a file whole unless it already holds this text, so its time is that of the last change."""
    if not path.exists() or path.read_text(encoding="utf-8") != text:
        write_whole(path, text)


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Add the name of `path` to an OSError from writing or locking, which names no file."""
    try:
        yield
    except OSError as error:
        if error.filename is None:
            error.filename = str(path)
        raise


@contextmanager
def _temporary(path: Path, text: str) -> Iterator[Path]:
    """A temporary file of this text beside `path`, its name unique over processes and hosts; then removed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{socket.gethostname()}.{uuid.uuid4().hex}.tmp")
    try:
        with naming(path), temporary.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        yield temporary
    finally:
        temporary.unlink(missing_ok=True)
