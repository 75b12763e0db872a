"""torch's DeviceMesh of a topology: DTensor computes on the levels' groups what one process computes."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import lowband
from lowband.run.on_ranks import on_ranks

INNER = {"package": 2, "node": 4}


def places() -> dict[str, list[int]]:
    """The ranks of this rank's group in each dimension."""
    mesh = lowband.Topology(INNER).device_mesh("cpu")
    return {name: dist.get_process_group_ranks(mesh.get_group(name)) for name in mesh.mesh_dim_names}


@pytest.mark.parametrize(
    ("ranks", "expected"),
    [
        (1, {"world": [0]}),
        (2, {"package": [0, 1]}),
        (4, {"node": [1, 3], "package": [0, 1]}),
        (8, {"world": [1, 5], "node": [1, 3], "package": [0, 1]}),
    ],
)
def test_dimensions_are_levels(ranks: int, expected: dict[str, list[int]]) -> None:
    assert on_ranks(ranks, places)[min(1, ranks - 1)] == expected


def a_network() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 5))


def tensor_parallel() -> list[torch.Tensor]:
    """Over the ranks of a package, beside data sharded by rows over the other levels."""
    mesh = lowband.Topology(INNER).device_mesh("cpu")
    network = parallelize_module(
        a_network(), mesh["package"], {"0": ColwiseParallel(), "2": RowwiseParallel()}
    )
    out = network(torch.arange(12.0).view(2, 6))
    rows = distribute_tensor(torch.arange(16.0).view(8, 2), mesh["world", "node"], [Shard(0), Shard(0)])
    # A copy, because the result of an unfinished collective would be pickled as it is.
    return [out.detach().clone(), rows.full_tensor(), rows.to_local().clone()]


def test_tensor_parallel_on_a_level() -> None:
    expected = a_network()(torch.arange(12.0).view(2, 6)).detach()
    for rank, (out, whole, mine) in enumerate(on_ranks(8, tensor_parallel)):
        assert torch.allclose(out, expected, rtol=1e-6)
        assert torch.equal(whole, torch.arange(16.0).view(8, 2))
        first = 2 * (rank // 2)  # a row pair for each package
        assert torch.equal(mine, whole[first : first + 2])
