"""Probes of what nodes share: their clocks, and the file system of the run's folder."""

import hashlib
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist

from lowband.engine.transport.meeting import Meeting, Tick

PINGS = 5
FILE_BYTES = 2**24  # that each rank writes and reads
SEEN_S = 5.0  # longest time until another node's file is visible
_TAG = 77


class Clock(NamedTuple):
    """Seconds by which a host's clock is ahead of rank 0's, and how far that may be off."""

    host: str
    ahead_s: float
    within_s: float


def clocks(hosts: Sequence[str], meeting: Meeting) -> list[Clock]:
    """The clock of each host but rank 0's own; the list is complete on rank 0 alone.

    hosts: of each rank, by rank
    The first rank of each host answers rank 0's pings; of several, the one with the shortest way counts.
    """
    rank, group, found = meeting.rank, meeting.group, []
    for host in sorted(set(hosts) - {hosts[0]}):
        other = hosts.index(host)
        if rank == 0:
            tries = [_ping(other, group) for _ in range(PINGS)]
            ahead, within = min(tries, key=lambda one: one[1])
            found.append(Clock(host, ahead, within))
        elif rank == other:
            for _ in range(PINGS):
                now = torch.zeros(1, dtype=torch.float64)
                dist.recv(now, 0, group=group, tag=_TAG)
                now[0] = time.time()
                dist.send(now, 0, group=group, tag=_TAG)
    return found


def _ping(other: int, group: dist.ProcessGroup) -> tuple[float, float]:
    theirs = torch.zeros(1, dtype=torch.float64)
    start = time.time()
    dist.send(theirs, other, group=group, tag=_TAG)
    dist.recv(theirs, other, group=group, tag=_TAG)
    stop = time.time()
    return theirs.item() - (start + stop) / 2, (stop - start) / 2


class Files(NamedTuple):
    """One rank's writing, and its reading of another rank's file.

    error: what went wrong, empty if nothing; of_rank: whose file it was
    """

    write_s: float
    read_s: float
    error: str
    of_rank: int


def write_and_read(folder: Path, hosts: Sequence[str], meeting: Meeting) -> Files:
    """Write a file in the run's folder, and read one that a rank of another host has written.

    Raises TimeoutError, on every rank, naming a rank whose file system hangs.
    """
    rank = meeting.rank
    content = os.urandom(FILE_BYTES)
    path = folder / f".preflight-{rank}"
    others = [r for r, host in enumerate(hosts) if host != hosts[rank]]
    from_rank = others[rank % len(others)] if others else rank

    def write(_: Tick) -> tuple[float, str]:
        start = time.perf_counter()
        try:
            with path.open("wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            return 0.0, f"cannot write {path.parent}: {error.strerror}"
        return time.perf_counter() - start, ""

    def read(_: Tick) -> tuple[float, str]:
        theirs = folder / f".preflight-{from_rank}"
        deadline = time.monotonic() + SEEN_S
        while not theirs.exists():
            if time.monotonic() > deadline:
                return 0.0, f"does not see the file of rank {from_rank} on {hosts[from_rank]}"
            time.sleep(0.05)
        start = time.perf_counter()
        try:
            found = theirs.read_bytes()
        except OSError as error:
            return 0.0, f"cannot read the file of rank {from_rank}: {error.strerror}"
        if hashlib.sha256(found).hexdigest() != sums[from_rank]:
            return 0.0, f"reads other bytes than rank {from_rank} on {hosts[from_rank]} wrote"
        return time.perf_counter() - start, ""

    try:
        write_s, error = meeting.together("writing a file in the run's folder", write)
        sums = meeting.everyone(hashlib.sha256(content).hexdigest())
        can_read = not any(meeting.everyone(error))  # else a missing file is explained already
        read_s, unread = (
            meeting.together("reading a file in the run's folder", read) if can_read else (0.0, "")
        )
        meeting.everyone(None)  # nobody removes a file that another rank still reads
    finally:
        path.unlink(missing_ok=True)
    return Files(write_s, read_s, error or unread, rank if error else from_rank)
