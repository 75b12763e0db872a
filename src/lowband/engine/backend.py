"""The back end of torch.distributed that carries this job's tensors."""

import torch
import torch.distributed as dist


def backend(group: dist.ProcessGroup | None = None) -> str:
    """gloo, nccl, fake: of a group, by default that of all ranks.

    Of a group with one back end for each kind of device, which torch calls `undefined` or by all names, that
    of GPUs where there are some.
    """
    name: str = dist.get_backend(group)
    of = dict(each.split(":") for each in dist.get_backend_config(group).split(",") if ":" in each)
    if name in of.values():
        return name
    return of["cuda"] if "cuda" in of and torch.cuda.is_available() else of.get("cpu", name)
