"""A graph's adjacency, kept as a sparse buffer."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

import lowband
from lowband.run.on_ranks import on_ranks

LAYOUTS = {"coo": torch.sparse_coo, "csr": torch.sparse_csr}


class Convolutions(nn.Module):
    def __init__(self, layout: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        edges = (torch.rand(6, 6) > 0.5).float()
        self.register_buffer("edges", edges.to_sparse(layout=LAYOUTS[layout]))

    def forward(self, rank: int) -> torch.Tensor:
        x = torch.randn(6, 4, generator=torch.Generator().manual_seed(rank))
        return self.second(self.edges @ torch.relu(self.first(x))).square().mean()


def trained(layout: str, folder: Path) -> tuple[dict[str, torch.Tensor], list[str]]:
    module = lowband.shard(Convolutions(layout), "zero3", lowband.Topology({}), nn.Linear, torch.float32)
    optimizer = torch.optim.SGD(module.parameters(), 0.1)
    module(dist.get_rank()).backward()
    optimizer.step()
    optimizer.zero_grad()
    said = []
    for save in (
        lambda: lowband.save_safetensors(module, folder / "weights"),
        lambda: lowband.Checkpointer(folder / "checkpoints").save(1, module, optimizer),
    ):
        with pytest.raises(lowband.UserError) as refused:
            save()
        said.append(str(refused.value))
    return lowband.full_state_dict(module), said


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("ranks", [1, 2])
def test_trains_as_a_plain_module_and_no_file_holds_it(layout: str, ranks: int, tmp_path: Path) -> None:
    plain = Convolutions(layout)
    for rank in range(ranks):
        (plain(rank) / ranks).backward()
    torch.optim.SGD(plain.parameters(), 0.1).step()
    of_ranks = on_ranks(ranks, trained, layout, tmp_path)
    for _, said in of_ranks:
        assert [line.count("buffer 'edges' is sparse") for line in said] == [1, 1]
    found, expected = of_ranks[0][0], plain.state_dict()
    torch.testing.assert_close(
        {name: value.to_dense() for name, value in found.items()},
        {name: value.to_dense() for name, value in expected.items()},
    )
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []
