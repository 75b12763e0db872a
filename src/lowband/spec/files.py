"""Files that are there whole or not at all. Needs nothing but the standard library."""

import os
from pathlib import Path


def write_whole(path: Path, text: str) -> None:
    """Write a file so that it is there whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with temporary.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


def write_if_changed(path: Path, text: str) -> None:
    """Write a file whole unless it holds this text already, so that its time tells when it last changed."""
    if not path.exists() or path.read_text(encoding="utf-8") != text:
        write_whole(path, text)
