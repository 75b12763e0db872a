"""Inputs of tensor ranks that are sparse or nested."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

import lowband
from lowband.run.on_ranks import on_ranks
from lowband.spec.axes import Axes
from lowband.spec.tensor import Column, Row
from tests.refused import answer


class OfAny(nn.Module):
    """Takes inputs of any layout beside the one that it computes with."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
        return self.down(torch.tanh(self.up(x)))  # type: ignore[no-any-return]


def with_layouts() -> list[str]:
    topology = lowband.Topology({}, Axes(tensor=2))
    x, rank, found = torch.eye(4), dist.get_rank(), []
    values = torch.tensor([[0.0, 1], [2, 0]])
    layouts = (
        torch.Tensor.to_sparse_coo, torch.Tensor.to_sparse_csr, torch.Tensor.to_sparse_csc,
        lambda t: torch.nested.nested_tensor([t, t[:1]], layout=torch.jagged),
        lambda t: torch.nested.nested_tensor([t, t[:1]]),
    )  # fmt: skip
    for laid in layouts:
        for of_rank in (values, values * (1 + rank), values.roll(rank)):
            torch.manual_seed(1)
            model = lowband.parallelize(OfAny(), {"up": Column(), "down": Row()}, topology)
            lowband.shard(model, "zero3", topology, nn.Linear, compute_dtype=torch.float32)
            other = laid(of_rank)
            found.append(answer(lambda model=model, other=other: model(x, other)))
    return found


@pytest.mark.filterwarnings("ignore")
def test_inputs_that_are_sparse_or_nested_are_compared() -> None:
    for found in on_ranks(2, with_layouts):
        assert found[::3] == [""] * 5
        assert all("rank 1 has other inputs than rank 0" in text for text in found[1::3] + found[2::3])
