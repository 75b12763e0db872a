"""What each rank reports about itself: host, versions, device, memory."""

import resource
import socket
from dataclasses import dataclass

import psutil
import torch
import torch.distributed as dist

from lowband.run.environment import source_sha256, versions
from lowband.spec.free_memory import free_memory


@dataclass(frozen=True)
class RankFacts:
    """One rank's own facts.

    device:      its name; `device_id` is the same for two ranks only if they share the device
    free_bytes:  memory that this rank can still take; total_bytes: of its device or its host
    """

    host: str
    versions: dict[str, str]
    device: str
    device_id: str
    free_bytes: int
    total_bytes: int


def own_facts(device: torch.device, rank: int, ranks_on_host: int) -> RankFacts:
    """The facts of a rank, this one. ranks_on_host: over how many ranks the host's memory is shared."""
    found = {**versions(), "lowband's source": source_sha256()[:12], "back end": dist.get_backend()}
    host = socket.gethostname()
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        free, total = torch.cuda.mem_get_info(device)
        identity = str(getattr(properties, "uuid", device.index))
        return RankFacts(host, found, properties.name, f"{host} {identity}", free, total)
    free = free_memory() // ranks_on_host
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    if limit != resource.RLIM_INFINITY:
        free = min(free, max(0, limit - psutil.Process().memory_info().vms))
    return RankFacts(host, found, "CPU", f"{host} rank {rank}", free, psutil.virtual_memory().total)
