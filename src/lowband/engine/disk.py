"""A file with tensors of one rank that are in memory only while they are used; checked whenever it is read.

The page cache would hide the disk: what was written is flushed, and then dropped from it, and so is what was
read. A piece that is not what was written, or not all there, is an error that names file and piece.
"""

import gc
import os
import shutil
import weakref
import zlib
from collections.abc import Iterator, Sequence
from contextlib import suppress
from ctypes import c_ubyte
from pathlib import Path

import torch

from lowband.errors import UserError
from lowband.spec.files import naming
from lowband.spec.lock import hold, is_held

PIECE_BYTES = 2**22


class Disk:
    """The folder of one rank's files. One run at a time has it."""

    def __init__(self, folder: Path, rank: int) -> None:
        """Raises UserError if another run has it, or if it cannot be written."""
        self.folder = folder / f"rank{rank}"
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            if is_held(lock := self.folder / "lock"):
                gc.collect()  # perhaps by a module that nothing else refers to any more
            self._lock = hold(lock)
            self._lock.__enter__()  # until this object is gone, or the process
            for left in self.folder.glob("*.states"):  # of a run that was killed
                left.unlink()
        except OSError as error:
            raise UserError(f"cannot be used: {error.strerror}", where=self.folder) from None

    def file(self, name: str, expected_bytes: int) -> "StateFile":
        """A new file. Raises UserError if the disk has no room for as many bytes."""
        return StateFile(self.folder / f"{name}.states", expected_bytes)


class StateFile:
    """One file, removed with this object."""

    def __init__(self, path: Path, expected_bytes: int) -> None:
        self.path, self._sums = path, dict[int, int]()  # checksums by the place of the piece
        try:
            self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600)
            weakref.finalize(self, _remove, self._file, path)
            os.posix_fallocate(self._file, 0, expected_bytes)
        except OSError as error:
            free = shutil.disk_usage(path.parent).free
            what = f"no room for {expected_bytes} bytes ({free} free): {error.strerror}"
            raise UserError(what, where=path) from None

    def write(self, tensors: Sequence[torch.Tensor]) -> None:
        """Write them one behind the other. An OSError names the file; then their memory is all there is."""
        with naming(self.path):
            for place, piece in _pieces(tensors):
                self._sums[place] = zlib.crc32(piece)
                done = 0
                while done < len(piece):
                    done += os.pwrite(self._file, piece[done:], place + done)
            self._flush()

    def read(self, tensors: Sequence[torch.Tensor]) -> None:
        """Fill them with what was written from as many. Raises UserError for a piece that is not that."""
        with naming(self.path):
            for place, piece in _pieces(tensors):
                done = 0
                while done < len(piece):
                    got = os.preadv(self._file, [piece[done:]], place + done)
                    if not got:
                        what = f"ends after {place + done} bytes, in a piece of {len(piece)} from {place}"
                        raise UserError(what, where=self.path)
                    done += got
                if zlib.crc32(piece) != self._sums[place]:
                    what = f"{len(piece)} bytes from {place} are not those that were written"
                    raise UserError(what, where=self.path)
            self._flush()

    def _flush(self) -> None:
        os.fdatasync(self._file)
        os.posix_fadvise(self._file, 0, 0, os.POSIX_FADV_DONTNEED)


def _pieces(tensors: Sequence[torch.Tensor]) -> Iterator[tuple[int, memoryview]]:
    """The place in the file and the bytes of each piece; a tensor begins one."""
    place = 0
    for tensor in tensors:
        # Not by way of NumPy: what it has seen cannot be freed any more.
        memory = memoryview((c_ubyte * tensor.nbytes).from_address(tensor.data_ptr())).cast("B")
        for start in range(0, len(memory), PIECE_BYTES):
            yield place + start, memory[start : start + PIECE_BYTES]
        place += len(memory)


def _remove(file: int, path: Path) -> None:
    with suppress(OSError):
        os.close(file)
        path.unlink()
