"""The environment of a run: hosts, device, software versions and variables."""

import hashlib
import os
import platform
import socket
import subprocess
from collections.abc import Mapping
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from lowband.spec.records import Environment

_PREFIXES = (
    "NCCL_", "RCCL_", "FI_", "HSA_", "OMP_", "SLURM_", "TORCH_", "PYTORCH_", "TRITON_",
    "GLOO_", "MKL_", "ROCR_", "CUDA_",
)  # fmt: skip
_PACKAGES = ("lowband", "torch", "triton", "deepspeed", "numpy", "pandas", "pydantic")


def describe(
    hosts: tuple[str, ...], device: "torch.device", backend: str, data: Mapping[str, Any], links: str
) -> "Environment":
    """The environment of this process. Rank 0 writes it; `hosts` are those of all ranks."""
    import torch  # imported late, because `doctor` must work without it

    from lowband.spec.records import Environment  # needs pydantic; `bench-kernel` works without it

    commit, dirty = code_version()
    return Environment(
        commit=commit,
        dirty=dirty,
        hosts=tuple(sorted(set(hosts))),
        device=torch.cuda.get_device_name(device) if device.type == "cuda" else cpu_name(),
        backend=backend,
        versions=versions(),
        variables={k: v for k, v in sorted(os.environ.items()) if k.startswith(_PREFIXES)},
        data=dict(data),
        links=links,
    )


@cache
def code_version() -> tuple[str, bool]:
    """Commit of the running code, and whether files differ from it. Only one rank of a job should call this.

    Files that git cannot compare, or not in time, count as differing, because nothing vouches for them.
    In a copy of the tree, LOWBAND_COMMIT names the commit that it was copied from: (LOWBAND_COMMIT, False).
    Without it and outside of git the result is ("unknown", False).
    """
    named = os.environ.get("LOWBAND_COMMIT")
    if named:
        return named, False
    here = Path(__file__).parents[1]  # the package
    try:
        commit = _git(here, "rev-parse", "HEAD")
    except (OSError, subprocess.SubprocessError):
        return "unknown", False
    try:
        return commit, bool(_git(here, "status", "--porcelain", "--", ".", ":/config"))
    except subprocess.SubprocessError:
        return commit, True


@cache
def source_sha256() -> str:
    """Checksum of all Python files of this package."""
    package = Path(__file__).parents[1]
    digest = hashlib.sha256()
    for path in sorted(package.rglob("*.py")):
        digest.update(str(path.relative_to(package)).encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()


def _git(folder: Path, *arguments: str) -> str:
    return subprocess.run(
        ["git", "-C", str(folder), *arguments], check=True, capture_output=True, text=True, timeout=10
    ).stdout.strip()


def versions() -> dict[str, str]:
    """Versions of Python, the system and the packages that a run depends on."""
    found = {"python": platform.python_version(), "system": platform.platform()}
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def cpu_name() -> str:
    """The processor's name, as far as the system reports it."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{names[0]}, {len(names)} cores" if names else platform.machine()


def host() -> str:
    return socket.gethostname()
