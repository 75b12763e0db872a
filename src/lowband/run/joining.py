"""Join a job as one of its ranks: its network, its device, the process group of all ranks."""

import ctypes
import os
from datetime import timedelta

import torch
import torch.distributed as dist

from lowband.box.network import SHAPED, join
from lowband.errors import UserError
from lowband.run.ranks import Rank
from lowband.spec.run import RunSpec

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, M_ARENA_MAX = -1, -3, -8  # of glibc's malloc.h

BACKENDS = {"cpu": "gloo", "cuda": "nccl"}  # by type of device


def join_job(rank: Rank, spec: RunSpec, links: str, device_type: str) -> torch.device:
    """Make this process a rank of the run's job; returns its device.

    links:       how ranks are connected (box.network.connect)
    device_type: of every rank, see `device_type`
    """
    if links == SHAPED:
        join(spec, rank.rank, rank.local_rank)
    share_one_heap()
    device = _device(rank, device_type)
    torch.set_num_threads(_threads(spec, device))
    dist.init_process_group(
        BACKENDS[device.type],
        init_method=rank.init_method,
        rank=rank.rank,
        world_size=rank.world,
        timeout=timedelta(seconds=spec.peer_timeout_s),
    )
    return device


def share_one_heap() -> None:
    """Let all threads of this process allocate from one heap, which keeps freed memory.

    glibc gives each thread its own heap, which keeps freed memory. Peak resident memory would then depend on
    how the threads of gloo and an engine took turns, not on what they held. And glibc returns large blocks to
    the system at once: faulting them in again took a third of the cores' time in a box.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:  # glibc
        mallopt(M_ARENA_MAX, 1)
        mallopt(M_MMAP_THRESHOLD, 2**30)
        mallopt(M_TRIM_THRESHOLD, 2**30)


def device_type(spec: RunSpec, is_launched: bool) -> str:
    """`cuda` if the machine's file names an accelerator and each rank has one here; otherwise `cpu`.

    The machine's file decides first, because runs of one suite are compared. NCCL allows one rank per device,
    so ranks started here that outnumber the devices train on the CPU; a launcher has counted them.
    Raises UserError if a launcher's process sees no device: node hours would be spent on CPUs.
    """
    is_accelerated = spec.machine.device.memory_gib is not None and spec.machine.box is None
    if not is_accelerated:
        return "cpu"
    devices = torch.cuda.device_count()
    if is_launched and not devices:
        raise UserError(
            f"torch {torch.__version__} sees no {spec.machine.device.name}",
            where=spec.run_id,
            allowed="a build of torch for it, on nodes that have it (docs/sites.md)",
        )
    return "cuda" if devices >= (1 if is_launched else spec.ranks) else "cpu"


def _threads(spec: RunSpec, device: torch.device) -> int:
    """This rank's share of the cores: one where they train, as sums in several threads have another order;
    beside a GPU they only update states in host memory.
    """
    if device.type == "cpu":
        return 1
    return max(1, len(os.sched_getaffinity(0)) // min(spec.ranks, torch.cuda.device_count()))


def _device(rank: Rank, device_type: str) -> torch.device:
    if device_type == "cpu":
        return torch.device("cpu")
    if torch.cuda._is_in_bad_fork():
        raise UserError(
            "HIP was initialised before the ranks were forked, as counting devices does without amdsmi",
            allowed="torchrun, srun with one task per rank, or the site's amdsmi (envs/rocm.yaml)",
        )
    # Slurm's --gpus-per-task=1 shows each rank one device, torchrun all devices of a node.
    device = torch.device("cuda", rank.local_rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device
