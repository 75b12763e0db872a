"""A file with tensors of one rank that are in memory only while they are used; checked whenever it is read.

The page cache would hide the disk, and take the memory that the tensors have left. So files go around it
(O_DIRECT); where their file system refuses that, they are flushed and dropped from it after each use. A piece
that is not what was written, or not all there, is an error that names file and piece.

[Note: pieces] What goes around the cache is aligned and whole blocks long, which tensors are not. They are
copied through two buffers: one is on its way while the other is copied and its checksum made. The buffers are
huge pages, because a disk takes few requests for 4 MiB in one place, and hundreds for pages here and there.
"""

import errno
import fcntl
import gc
import mmap
import os
import shutil
import threading
import time
import weakref
import zlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from ctypes import c_ubyte
from pathlib import Path
from typing import NamedTuple
from urllib.parse import quote
from weakref import WeakValueDictionary

import torch

from lowband.errors import UserError
from lowband.spec.files import naming
from lowband.spec.lock import hold, is_held

PIECE_BYTES = 2**22
LONGEST_WRITE_S = 60.0  # that is waited for, of a module that has ended
_BLOCK_BYTES = mmap.PAGESIZE  # a multiple of a disk's
_HUGE_BYTES = 2**21


class Disk:
    """The folder of one rank's files. One run at a time has it."""

    def __init__(self, folder: Path, rank: int) -> None:
        """Raises UserError if another run has it, or if it cannot be written."""
        self.folder = folder / f"rank{rank}"
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            if is_held(lock := self.folder / "lock"):
                _wait_for_end(self.folder)
            self._lock = hold(lock)
            self._lock.__enter__()  # until this object is gone, or the process
            for left in self.folder.glob("*.states"):  # of a run that was killed
                left.unlink()
            self._buffers = _Buffers()
            _of_folders[self.folder] = self
        except OSError as error:
            raise UserError(f"cannot be used: {error.strerror}", where=self.folder) from None

    def file(self, name: str, expected_bytes: int) -> "StateFile":
        """A new file. Raises UserError if the disk has no room for as many bytes."""
        path = self.folder / f"{quote(name, safe=' ()')}.states"  # names of modules may have slashes
        return StateFile(path, expected_bytes, self._buffers)

    @property
    def is_busy(self) -> bool:
        """Whether a file is being read or written."""
        return self._buffers.are_used


_of_folders: WeakValueDictionary[Path, Disk] = WeakValueDictionary()  # of this process


def _wait_for_end(folder: Path) -> None:
    """Let a module of this process end that nothing refers to any more, but its last writes, which may run.
    One that is in use has the folder still, a second later.
    """
    idle, until = 0, time.monotonic() + LONGEST_WRITE_S
    while folder in _of_folders and idle < 20 and time.monotonic() < until:
        idle = 0 if _is_busy(folder) else idle + 1
        gc.collect()
        time.sleep(0.05)


def _is_busy(folder: Path) -> bool:
    disk = _of_folders.get(folder)
    return disk is not None and disk.is_busy


class StateFile:
    """One file, removed with this object.

    is_direct: whether it goes around the page cache
    """

    def __init__(self, path: Path, expected_bytes: int, buffers: "_Buffers") -> None:
        self.path, self._buffers = path, buffers
        self._sums = dict[int, int]()  # checksums by the place of the piece
        try:
            self._file, self.is_direct = _open(path)
            weakref.finalize(self, _remove, self._file, path, os.getpid())
            os.posix_fallocate(self._file, 0, _padded(max(1, expected_bytes)))
            if self.is_direct and not buffers.can_read(self._file):
                flags = fcntl.fcntl(self._file, fcntl.F_GETFL)
                fcntl.fcntl(self._file, fcntl.F_SETFL, flags & ~os.O_DIRECT)
                self.is_direct = False
        except OSError as error:
            free = shutil.disk_usage(path.parent).free
            what = f"no room for {expected_bytes} bytes ({free} free): {error.strerror}"
            raise UserError(what, where=path) from None

    def write(self, tensors: Sequence[torch.Tensor]) -> None:
        """Write them one behind the other. An OSError names the file; then their memory is all there is."""
        with naming(self.path), self._buffers as buffers:
            for number, piece in enumerate(_pieces(tensors)):
                buffer = buffers[number % 2]
                buffer.wait()  # for the piece before the last one
                torch.cat(piece.parts, out=buffer.values[: piece.size])
                self._sums[piece.place] = zlib.crc32(buffer.memory[: piece.size])
                buffer.start(self._put, buffer.memory[: _padded(piece.size)], piece.place)
            for buffer in buffers:
                buffer.wait()
            self._flush()

    def read(self, tensors: Sequence[torch.Tensor]) -> None:
        """Fill them with what was written from as many. Raises UserError for a piece that is not that."""
        pieces = list(_pieces(tensors))
        with naming(self.path), self._buffers as buffers:
            for buffer, first in zip(buffers, pieces, strict=False):
                buffer.start(self._fill, buffer.memory, first)
            for number, piece in enumerate(pieces):
                buffer = buffers[number % 2]
                buffer.wait()
                if zlib.crc32(buffer.memory[: piece.size]) != self._sums[piece.place]:
                    what = f"{piece.size} bytes from {piece.place} are not those that were written"
                    raise UserError(what, where=self.path)
                torch._foreach_copy_(piece.parts, buffer.values[: piece.size].split([*map(len, piece.parts)]))
                for following in pieces[number + 2 : number + 3]:
                    buffer.start(self._fill, buffer.memory, following)
            self._flush()

    def _put(self, memory: memoryview, place: int) -> None:
        done = 0
        while done < len(memory):
            done += os.pwrite(self._file, memory[done:], place + done)

    def _fill(self, memory: memoryview, piece: "_Piece") -> None:
        done, padded = 0, _padded(piece.size)
        while done < piece.size:
            got = os.preadv(self._file, [memory[done:padded]], piece.place + done)
            done += got
            if not got or (
                self.is_direct and got % _BLOCK_BYTES and done < piece.size
            ):  # the end of the file
                what = f"ends after {piece.place + done} bytes, in a piece of {piece.size} from {piece.place}"
                raise UserError(what, where=self.path)

    def _flush(self) -> None:
        if not self.is_direct:
            os.fdatasync(self._file)
            os.posix_fadvise(self._file, 0, 0, os.POSIX_FADV_DONTNEED)


class _Buffer:
    """One of a Disk's. While something has started it has the memory.

    memory, values: the same bytes
    """

    def __init__(self, memory: memoryview, thread: ThreadPoolExecutor) -> None:
        self.memory, self.values = memory, torch.frombuffer(memory, dtype=torch.uint8)
        self._thread = thread
        self._started: Future[None] | None = None

    def start(self, work: Callable[..., None], *arguments: object) -> None:
        self._started = self._thread.submit(work, *arguments)

    def wait(self) -> None:
        """Raises the error of what has started."""
        if self._started is not None:
            started, self._started = self._started, None
            started.result()

    def end(self) -> None:
        """Wait; another error has been raised, or none is."""
        with suppress(Exception):
            self.wait()


class _Buffers:
    """A Disk's two. In a context one file at a time has them. [Note: pieces]"""

    def __init__(self) -> None:
        self._lock, thread = threading.Lock(), ThreadPoolExecutor(1, thread_name_prefix="lowband-file")
        size = 2 * PIECE_BYTES
        memory = mmap.mmap(-1, size + _HUGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        with suppress(OSError):  # a kernel without
            memory.madvise(mmap.MADV_HUGEPAGE)
        start = -torch.frombuffer(memory, dtype=torch.uint8).data_ptr() % _HUGE_BYTES
        places = start, start + PIECE_BYTES
        self._two = tuple(_Buffer(memoryview(memory)[a : a + PIECE_BYTES], thread) for a in places)

    def __enter__(self) -> Sequence[_Buffer]:
        self._lock.acquire()
        return self._two

    def __exit__(self, *_: object) -> None:
        for buffer in self._two:
            buffer.end()
        self._lock.release()

    @property
    def are_used(self) -> bool:
        """Whether a file has them."""
        return self._lock.locked()

    def can_read(self, file: int) -> bool:
        """Whether what is around the page cache is more than a flag, which some file systems take."""
        with self as buffers:
            try:
                os.preadv(file, [buffers[0].memory[:_BLOCK_BYTES]], 0)
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
                return False
        return True


class _Piece(NamedTuple):
    """Its place in the file, and what it has of the tensors, one behind the other, as bytes."""

    place: int
    size: int
    parts: list[torch.Tensor]


def _pieces(tensors: Sequence[torch.Tensor]) -> Iterator[_Piece]:
    place, size, parts = 0, 0, list[torch.Tensor]()
    for tensor in tensors:
        if not tensor.nbytes:
            continue
        # Not by way of NumPy: what it has seen cannot be freed any more. And no view: it would count as a
        # change that others make.
        memory = (c_ubyte * tensor.nbytes).from_address(tensor.data_ptr())
        left = torch.frombuffer(memory, dtype=torch.uint8)
        while len(left):
            parts.append(left[: PIECE_BYTES - size])
            size, left = size + len(parts[-1]), left[PIECE_BYTES - size :]
            if size == PIECE_BYTES:
                yield _Piece(place, size, parts)
                place, size, parts = place + size, 0, []
    if parts:
        yield _Piece(place, size, parts)


def _padded(size: int) -> int:
    return -(-size // _BLOCK_BYTES) * _BLOCK_BYTES


def _open(path: Path) -> tuple[int, bool]:
    """A new file, and whether its file system takes the flag to go around the page cache."""
    flags = os.O_RDWR | os.O_CREAT | os.O_TRUNC
    try:
        return os.open(path, flags | os.O_DIRECT, 0o600), True
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        return os.open(path, flags, 0o600), False


def _remove(file: int, path: Path, process: int) -> None:
    """process: whose file it is; one that was forked from it ends without"""
    if os.getpid() != process:
        return
    with suppress(OSError):
        os.close(file)
        path.unlink()
