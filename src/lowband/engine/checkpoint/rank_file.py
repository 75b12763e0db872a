"""The file of one rank in a checkpoint: plain values, one chunk after the other.

Values are in the machine's byte order, which is little-endian wherever torch runs.
"""

import hashlib
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch

from lowband.engine.checkpoint.logical_tensors import Piece
from lowband.engine.checkpoint.manifest import Chunk, Damaged, File, Saved, file_name
from lowband.engine.transport.meeting import Tick
from lowband.errors import UserError
from lowband.spec.partition import intersect

STEP_BYTES = 2**26  # written, read or hashed between two ticks
SYNC_BYTES = 2**28  # synced between two ticks: one sync of a large file could outlast the timeout


def write_rank_file(
    folder: Path, rank: int, pieces: Mapping[str, Piece], tick: Tick
) -> tuple[File, dict[str, Saved]]:
    """Write pieces that are on the CPU.

    Returns the file's size and checksum, and the pieces' manifest entries with the chunks written here.
    Raises UserError naming the file if it cannot be written.
    """
    path, digest, entries = folder / file_name(rank), hashlib.sha256(), {}
    with naming(path), path.open("wb") as file:
        for name, piece in pieces.items():
            chunk = Chunk(rank, file.tell(), piece.start, piece.local.numel())
            entries[name] = piece.saved.model_copy(update={"chunks": (chunk,) if chunk.length else ()})
            for part in _steps(piece.local):
                file.write(part)
                digest.update(part)
                if file.tell() // SYNC_BYTES > (file.tell() - len(part)) // SYNC_BYTES:
                    os.fsync(file.fileno())
                tick()
        file.flush()
        os.fsync(file.fileno())
        return File(bytes=file.tell(), sha256=digest.hexdigest()), entries


def verify_rank_file(folder: Path, rank: int, expected: File, tick: Tick) -> None:
    """Raise Damaged, naming the file, unless its size and checksum are as expected."""
    path, digest = folder / file_name(rank), hashlib.sha256()
    try:
        with path.open("rb") as file:
            if os.fstat(file.fileno()).st_size == expected.bytes:
                buffer = bytearray(min(STEP_BYTES, expected.bytes))
                while count := file.readinto(buffer):
                    digest.update(memoryview(buffer)[:count])
                    tick()
    except OSError as error:
        raise Damaged(f"cannot be read: {error.strerror}", where=path) from None
    if digest.hexdigest() != expected.sha256:
        raise Damaged("is damaged: its size or checksum differs from the manifest's", where=path)


def read_range(folder: Path, saved: Saved, start: int, count: int, tick: Tick) -> torch.Tensor:
    """Elements `start` to `start + count` of a flattened tensor, 1D, on the CPU.

    Raises UserError naming the file that cannot be read.
    """
    values = torch.empty(count, dtype=saved.torch_dtype)
    for chunk in saved.chunks:
        a, b = intersect((chunk.start, chunk.start + chunk.length), (start, start + count))
        if a == b:
            continue
        path = folder / file_name(chunk.rank)
        with naming(path), path.open("rb") as file:
            file.seek(chunk.offset + (a - chunk.start) * values.itemsize)
            for part in _steps(values[a - start : b - start]):
                if file.readinto(part) != len(part):
                    raise UserError("is too short", where=path)
                tick()
    return values


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Turn an OSError into a UserError that names the path; a full disk's OSError does not."""
    try:
        yield
    except OSError as error:
        raise UserError(f"cannot be read or written: {error.strerror or error}", where=path) from error


def _steps(values: torch.Tensor) -> Iterator[memoryview]:
    """The memory of a 1D tensor in pieces of at most STEP_BYTES."""
    memory = values.view(torch.uint8).numpy().data
    for start in range(0, len(memory), STEP_BYTES):
        yield memory[start : start + STEP_BYTES]
