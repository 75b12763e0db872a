"""DeepSpeed's `MoE` as a peer on the same ranks: the same experts and router; bytes counted from outside."""

from importlib import import_module
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import nn

import lowband
from lowband.run.count_calls import Outside
from lowband.run.on_ranks import on_ranks
from lowband.spec.mesh import Levels
from lowband.spec.records import CONTROL
from lowband.trainers import deepspeed

H, WIDTH, EXPERTS, TOKENS = 16, 24, 4, 24  # tokens of a rank
BYTES = 4  # fp32


class Found(NamedTuple):
    """
    theirs, ours: output, gradients of x, of the router, of this rank's experts
    they_sent, we_sent: bytes of tensors, from outside
    loads: of this rank's tokens, pairs by expert
    """

    theirs: list[torch.Tensor]
    ours: list[torch.Tensor]
    they_sent: int
    we_sent: int
    loads: list[int]


@pytest.fixture(autouse=True, scope="module")
def imported() -> None:
    """Once: each rank of each test would compute for seconds."""
    deepspeed.load("cpu")
    import_module("deepspeed.moe.layer")


def _both(top_k: int) -> Found:
    import deepspeed as package
    from deepspeed.moe.layer import MoE

    package.init_distributed("gloo", auto_mpi_discovery=False, verbose=False)
    ranks, rank = dist.get_world_size(), dist.get_rank()
    topology = lowband.Topology({}, lowband.Axes(expert=ranks, route="flat"))
    torch.manual_seed(0)
    ours = lowband.MixtureOfExperts(H, WIDTH, lowband.Routing(EXPERTS, top_k, normalized=top_k > 1))
    whole = [p.detach().clone() for p in (ours.router.weight, ours.experts.up, ours.experts.down)]
    lowband.spread_experts(ours, topology)
    expert = nn.Sequential(nn.Linear(H, WIDTH, bias=False), nn.GELU(), nn.Linear(WIDTH, H, bias=False))
    options = {"min_capacity": 1, "use_rts": False, "top2_2nd_expert_sampling": False}
    peer = MoE(H, expert, EXPERTS, ranks, top_k, drop_tokens=False, **options)
    peer.set_deepspeed_parallelism()
    theirs = peer.deepspeed_moe.experts.deepspeed_experts
    first = rank * len(theirs)
    with torch.no_grad():
        peer.deepspeed_moe.gate.wg.weight.copy_(whole[0])
        for place, each in enumerate(theirs):
            each[0].weight.copy_(whole[1][first + place])
            each[2].weight.copy_(whole[2][first + place])
    x = torch.randn(TOKENS, H, generator=torch.Generator().manual_seed(1 + rank))
    outside = Levels(("world",), (ranks,))

    their_x = x.clone().requires_grad_()
    with Outside(outside, None) as sent:
        their_out, _, loads = peer(their_x)
        their_out.square().sum().backward()
    of_theirs = [
        their_out, their_x.grad, peer.deepspeed_moe.gate.wg.weight.grad,
        *(torch.stack([each[layer].weight.grad for each in theirs]) for layer in (0, 2)),
    ]  # fmt: skip
    they_sent = sum(each.bytes for each in sent.sent if each.collective != CONTROL)

    our_x = x.clone().requires_grad_()
    with Outside(outside, topology.along("expert").lanes(x.device)) as sent:
        our_out = ours(our_x)
        our_out.square().sum().backward()
    matrices = ours.router.weight, ours.experts.up, ours.experts.down
    of_ours = [our_out, our_x.grad, *(p.grad for p in matrices)]
    tensors = [[t.detach() for t in each if t is not None] for each in (of_theirs, of_ours)]
    return Found(*tensors, they_sent, sum(each.bytes for each in sent.sent), loads.tolist())


@pytest.mark.parametrize(("ranks", "top_k"), [(2, 1), (2, 2), (4, 2)])
def test_same_numbers_and_fewer_bytes(ranks: int, top_k: int) -> None:
    """Theirs pads every expert's rows to the most that any has on any rank, so that none is dropped; ours
    sends a row for each pair whose expert is elsewhere. Both go there and back, and so do gradients."""
    found = on_ranks(ranks, _both, top_k)
    for one in found:
        for mine, other in zip(one.ours, one.theirs, strict=True):
            torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-5)
    capacity, per = max(max(one.loads) for one in found), EXPERTS // ranks
    row = H * BYTES
    out, come = [], []
    for rank, one in enumerate(found):
        here = range(rank * per, (rank + 1) * per)
        out.append(sum(load for expert, load in enumerate(one.loads) if expert not in here))
        come.append(sum(other.loads[expert] for other in found for expert in here if other is not one))
    for rank, one in enumerate(found):
        assert one.they_sent == 4 * capacity * EXPERTS * row * (ranks - 1) // ranks
        rows, numbers = 2 * (out[rank] + come[rank]) * row, out[rank] * 4 + (ranks - 1) * 8
        assert one.we_sent == rows + numbers
        assert one.we_sent < one.they_sent
    assert sum(out) == sum(come)
