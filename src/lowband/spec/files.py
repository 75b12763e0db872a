"""Files that are there whole or not at all. Needs nothing but the standard library."""

import os
import socket
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def write_whole(path: Path, text: str) -> None:
    """Write a file so that it is there whole or not at all. An OSError names the file."""
    with _temporary(path, text) as temporary:
        temporary.replace(path)


def create_whole(path: Path, text: str) -> bool:
    """Write a file unless it exists: of several writers the first one wins. Whether it was this one."""
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
    """Write a file whole unless it holds this text already, so that its time tells when it last changed."""
    if not path.exists() or path.read_text(encoding="utf-8") != text:
        write_whole(path, text)


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Give an OSError of writing or locking, which names no file, the name of `path`."""
    try:
        yield
    except OSError as error:
        if error.filename is None:
            error.filename = str(path)
        raise


@contextmanager
def _temporary(path: Path, text: str) -> Iterator[Path]:
    """A file of this text beside `path`, under a name that no process on any host uses; gone at the end."""
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
