"""Files written atomically: whole or not at all. Needs only the standard library."""

import os
import socket
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TextIO


def write_whole(path: Path, text: str) -> None:
    """Write a file atomically: it appears whole or not at all. An OSError names the file."""
    with writing_whole(path) as file:
        file.write(text)


@contextmanager
def writing_whole(path: Path) -> Iterator[TextIO]:
    """The same, piece by piece: the file appears at the end of the block, or not at all if it raises."""
    with _temporary(path) as temporary:
        with _writing(path, temporary) as file:
            yield file
        temporary.replace(path)


def create_whole(path: Path, text: str) -> bool:
    """Write a file unless it exists; of several writers the first wins. Returns whether it was this one."""
    with _temporary(path) as temporary:
        with _writing(path, temporary) as file:
            file.write(text)
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
    if not path.exists() or path.read_bytes() != text.encode():
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
def _temporary(path: Path) -> Iterator[Path]:
    """A name beside `path` for a temporary file, unique over processes and hosts; removed in the end.

    If the block raises, so are the folders that were made for it, as far as they are empty.
    """
    made = [folder for folder in path.parents if not folder.exists()]  # the innermost first
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{socket.gethostname()}.{uuid.uuid4().hex}.tmp")
    try:
        yield temporary
    except BaseException:
        temporary.unlink(missing_ok=True)
        with suppress(OSError):  # others write there, too
            for folder in made:
                folder.rmdir()
        raise
    finally:
        temporary.unlink(missing_ok=True)


@contextmanager
def _writing(path: Path, temporary: Path) -> Iterator[TextIO]:
    with naming(path), temporary.open("w", encoding="utf-8") as file:
        yield file
        file.flush()
        os.fsync(file.fileno())
