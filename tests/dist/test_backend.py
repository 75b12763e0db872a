"""The back end is known by what carries the tensors, whatever torch calls the group."""

import torch.distributed as dist

import lowband
from lowband.engine.backend import backend
from lowband.run.on_ranks import on_ranks


def of_torchs_default() -> tuple[str, bool]:
    """`init_process_group()` takes a back end for each kind of device, and calls the group undefined."""
    before, rank = backend(), dist.get_rank()
    store = dist.PrefixStore("again", dist.distributed_c10d._get_default_store())
    dist.destroy_process_group()
    dist.init_process_group(store=store, rank=rank, world_size=2)
    [hop] = lowband.Topology({"node": 2}).along("data").hops("self", "world")
    return f"{before} {backend()} {dist.get_backend()}", hop.back is not None


def test_torchs_default_is_gloo_on_cpus() -> None:
    """So messages have names and go both ways in groups of their own, as under gloo."""
    assert on_ranks(2, of_torchs_default) == [("gloo gloo undefined", True)] * 2
