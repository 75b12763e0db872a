"""What a job may still take is the least that its control groups and the machine leave."""

from collections import namedtuple
from pathlib import Path

import psutil
import pytest

from lowband.spec.free_memory import V1, V2, free_memory

Memory = namedtuple("Memory", "available")
GIB = 2**30


def _group(folder: Path, files: tuple[str, str, str], limit: int | str, taken: int, cached: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, value in zip(files[:2], (limit, taken), strict=True):
        (folder / name).write_text(f"{value}\n")
    (folder / "memory.stat").write_text(f"anon {taken - cached}\n{files[2]} {cached}\nfile 0\n")


@pytest.fixture(autouse=True)
def _machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(psutil, "virtual_memory", lambda: Memory(64 * GIB))


@pytest.mark.parametrize(("line", "top", "files"), [("0::", "", V2), ("7:cpu,memory:", "memory", V1)])
def test_the_tightest_group_decides(tmp_path: Path, line: str, top: str, files: tuple[str, str, str]) -> None:
    own, mounted = tmp_path / "cgroup", tmp_path / "groups"
    own.write_text(f"3:pids:/slurm/job\n{line}/slurm/job/step\n")
    assert free_memory(own, mounted) == 64 * GIB  # nothing is mounted
    _group(mounted / top / "slurm" / "job" / "step", files, "max" if files is V2 else 2**63 - 4096, 0, 0)
    assert free_memory(own, mounted) == 64 * GIB  # no limit
    _group(mounted / top / "slurm" / "job", files, 8 * GIB, 5 * GIB, 2 * GIB)
    assert free_memory(own, mounted) == 5 * GIB  # the cache of files is freed when memory is short
    _group(mounted / top, files, 4 * GIB, 6 * GIB, 0)
    assert free_memory(own, mounted) == 0  # more is taken than a limit that was lowered


def test_in_a_container_the_mounted_folder_is_its_own(tmp_path: Path) -> None:
    own, mounted = tmp_path / "cgroup", tmp_path / "groups"
    own.write_text("0::/of/the/host\n")
    _group(mounted, V2, 3 * GIB, GIB, 0)
    assert free_memory(own, mounted) == 2 * GIB


def test_without_groups_it_is_the_machine_s(tmp_path: Path) -> None:
    assert free_memory(tmp_path / "none", tmp_path) == 64 * GIB
    assert 0 <= free_memory() <= 64 * GIB  # of this machine's own groups, whatever they leave
