"""Bytes that this process's job may still take of its node's memory: the machine's, or its control group's.

Slurm, containers and systemd limit a job's memory by a control group, whose limit may be far below what the
machine has free. Source: Linux, Documentation/admin-guide/cgroup-v1/memory.rst and cgroup-v2.rst.
"""

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil

OWN, MOUNTED = Path("/proc/self/cgroup"), Path("/sys/fs/cgroup")
# Of each version: the limit, what is taken, and of that, in memory.stat, what is freed when memory is short.
V1 = "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"
V2 = "memory.max", "memory.current", "inactive_file"


def free_memory(own: Path = OWN, mounted: Path = MOUNTED) -> int:
    """own: the file that names this process's groups; mounted: the folder of all groups"""
    return max(0, min([int(psutil.virtual_memory().available), *_left_by_groups(own, mounted)]))


def _left_by_groups(own: Path, mounted: Path) -> Iterator[int]:
    """Of this process's group and of each that it lies in, those that have a limit.

    Within a container the paths may be the host's, of which only the mounted folder itself is there.
    """
    with suppress(OSError):
        for line in own.read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers == "":
                top, files = mounted, V2
            elif "memory" in controllers.split(","):
                top, files = mounted / "memory", V1
            else:
                continue
            inner = top / path.lstrip("/")
            for group in (inner, *inner.parents):
                if not group.is_relative_to(top):
                    break
                with suppress(OSError, ValueError, StopIteration):  # no such group, or "max": no limit
                    yield _left(group, *files)


def _left(group: Path, limit: str, taken: str, freed: str) -> int:
    most, now = (int((group / name).read_text()) for name in (limit, taken))
    stat = (group / "memory.stat").read_text().splitlines()
    cached = next(int(line.split()[1]) for line in stat if line.split()[0] == freed)
    return most - now + cached
