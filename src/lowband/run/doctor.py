"""Examine this machine: hardware and software found, and what they allow."""

import shutil
import sys
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

from lowband.box import links, slurm
from lowband.cost.numbers import GIB
from lowband.errors import UserError, install
from lowband.kernels import c_library
from lowband.run.environment import cpu_name
from lowband.run.submit import why_not
from lowband.spec.free_memory import free_memory

# Needs of `make reproduce`, rounded up from those of the shipped runs and a set-up (report/needs.py).
NEEDED_DISK_GIB = 4
NEEDED_MEMORY_GIB = 6


def examine() -> str:
    """The findings, one line each: subject, finding, consequence."""
    rows = [*_machine(), *_torch(), *_deepspeed(), *_compiler(), *_slurm(), *_box(), *_packages()]
    width = max(len(what) for what, _, _ in rows)
    found_width = max(len(found) for _, found, _ in rows)
    return "\n".join(
        f"{what:<{width}}  {found:<{found_width}}  {follows}".rstrip() for what, found, follows in rows
    )


Row = tuple[str, str, str]


def _machine() -> Iterator[Row]:
    yield "python", sys.version.split()[0], "" if sys.version_info >= (3, 11) else "3.11 or later is needed"
    yield "processor", cpu_name(), "make reproduce runs up to 8 ranks on it; 2 cores are enough"
    memory_gib = free_memory() / GIB
    enough = memory_gib >= NEEDED_MEMORY_GIB
    yield (
        "memory free",
        f"{memory_gib:.1f} GiB",
        "enough" if enough else f"make reproduce needs {NEEDED_MEMORY_GIB} GiB",
    )
    disk_gib = shutil.disk_usage(Path.cwd()).free / GIB
    enough = disk_gib >= NEEDED_DISK_GIB
    yield "disk free here", f"{disk_gib:.1f} GiB", "enough" if enough else f"{NEEDED_DISK_GIB} GiB are needed"


def _torch() -> Iterator[Row]:
    if find_spec("torch") is None:
        yield (
            "torch",
            "missing",
            f"no training here; predictions, tables and figures work; {install('torch')}",
        )
        return
    import torch
    import torch.distributed as dist

    yield "torch", torch.__version__, f"built for {_build(torch)}"
    devices = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    if devices:
        yield "devices", f"{len(devices)} x {devices[0]}", "ranks of a machine with devices train on them"
    else:
        yield "devices", "none", "ranks train on the CPU"
    yield "gloo", _yes(dist.is_gloo_available()), "ranks on CPU"
    collective = "RCCL" if torch.version.hip else "NCCL"
    yield collective, _yes(dist.is_nccl_available()), "ranks on GPUs" if dist.is_nccl_available() else ""


def _build(torch) -> str:
    if torch.version.hip:
        return f"ROCm {torch.version.hip}"
    return f"CUDA {torch.version.cuda}" if torch.version.cuda else "CPU"


def _deepspeed() -> Iterator[Row]:
    try:
        found = version("deepspeed")
    except PackageNotFoundError:
        yield "deepspeed", "missing", f"suite `peers` needs it; {install('deepspeed')}"
        return
    compilers = [name for name in ("nvcc", "hipcc", "g++", "ninja") if shutil.which(name)]
    yield (
        "deepspeed",
        found,
        f"its ops are built on demand with: {', '.join(compilers) or 'no compiler is installed'}",
    )


def _compiler() -> Iterator[Row]:
    try:
        found = c_library.compiler().version
    except UserError as error:
        yield "C compiler", "none", f"no softmax in C, and no box for an ordinary user; {error.allowed}"
        return
    yield "C compiler", found, "softmax in C; the box of an ordinary user"


def _slurm() -> Iterator[Row]:
    commands = [name for name in ("sbatch", "srun", "squeue", "sacct") if shutil.which(name)]
    reason = why_not()
    yield "Slurm", ", ".join(commands) or "none", reason or "jobs can be submitted from here"


def _box() -> Iterator[Row]:
    """What the simulated nodes of `lowband box` and of paced links need."""
    no_links = links.missing()  # ip, tc, namespaces
    yield "shaped links", _yes(not no_links), no_links or "paced links, `lowband train --links private`"
    no_box = no_links or slurm.missing()  # the daemons, munge
    yield "Slurm in a box", _yes(not no_box), no_box or "lowband box up"


def _packages() -> Iterator[Row]:
    for package in ("triton", "snakemake", "pandas", "seaborn", "papermill"):
        try:
            yield package, version(package), ""
        except PackageNotFoundError:
            yield package, "missing", install(package)


def _yes(value: bool) -> str:
    return "yes" if value else "no"
