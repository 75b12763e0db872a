"""Replicas that meet seldom, with sequences over ranks along context: each one's loss is the mean over its
own tokens, as if it trained alone, and nothing crosses to another replica before they meet.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from seldom import run
from started import counts_as_closed_forms
from torch import nn

import lowband
from lowband.errors import UserError
from lowband.run.on_ranks import on_ranks
from lowband.spec.scheme import Scheme
from lowband.spec.sync import Sync
from tests.checkout import CONFIG

WIDTH, TOKENS, STEPS = 8, 12, 3
SEPARATE = CONFIG.scheme("diloco").model_copy(update={"sync": Sync(beyond="node", every=STEPS + 1)})


class Layer(nn.Module):
    def __init__(self, context: lowband.Context) -> None:
        super().__init__()
        self.context, self.qkv = context, nn.Linear(WIDTH, 3 * WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (each.unflatten(-1, (2, -1)).transpose(1, 2) for each in self.qkv(x).chunk(3, -1))
        return x + self.context.attention(q, k, v).transpose(1, 2).flatten(2)


def _losses(
    context: int, inner: dict[str, int], scheme: Scheme, replicas: list[int]
) -> tuple[list[torch.Tensor], set[tuple[str, str]]]:
    """This rank's losses, and the levels over which counts of tokens were sent. replicas: whose sequences it
    sees, by rank"""
    topology = lowband.Topology(inner, lowband.Axes(context=context))
    torch.manual_seed(0)
    along = lowband.Context(topology)
    layer = Layer(along)
    along.bind(layer)
    lowband.shard(layer, scheme, topology, nn.Linear, compute_dtype=torch.float32)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.5)
    replica = replicas[topology.along("data").place]
    generator, losses = torch.Generator().manual_seed(replica), []
    for _ in range(STEPS):
        x = torch.randn(1, TOKENS, WIDTH, generator=generator)
        counted = torch.rand(1, TOKENS, generator=generator) < (0.2, 0.9)[replica]
        y = layer(along.split(x)).square().sum(-1)
        mine = along.split(counted, fill=False)
        loss = along.mean((y * mine).sum(), mine)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    rows = along.ledger.take()
    return losses, {(row.collective, row.level) for row in rows if row.collective == "tokens_count"}


@pytest.mark.parametrize("ranks", [4, 8])
def test_each_replica_divides_by_its_own_tokens(ranks: int) -> None:
    """The second replica has four times as many tokens that count."""
    of_one = ranks // 2
    replicas = [rank // of_one for rank in range(ranks)]
    found = on_ranks(ranks, _losses, of_one, {"node": of_one}, SEPARATE, replicas)
    for replica in range(2):
        [(alone, _)] = on_ranks(1, _losses, 1, {"node": 1}, CONFIG.scheme("ddp"), [replica])
        own = found[replica * of_one :][:of_one]
        together = [torch.stack(parts).mean() for parts in zip(*(losses for losses, _ in own), strict=True)]
        torch.testing.assert_close(together, alone)
        assert all(sent == {("tokens_count", "node")} for _, sent in own)


@pytest.mark.parametrize("device", ["auto", "fake"])
def test_a_run_sends_the_closed_form(tmp_path: Path, device: str) -> None:
    scheme = CONFIG.scheme("diloco").model_copy(update={"sync": Sync(beyond="node", every=3)})
    more: dict[str, Any] = {"ranks": 8, "steps": 6, "context": 2, "device": device}
    counts_as_closed_forms(run(tmp_path, scheme=scheme.model_dump(), **more))


def _unbound(degree: int) -> str:
    topology = lowband.Topology({"node": 2}, lowband.Axes(context=degree))
    context = lowband.Context(topology)
    layer = lowband.shard(Layer(context), SEPARATE, topology, nn.Linear, compute_dtype=torch.float32)
    y = layer(context.split(torch.randn(1, TOKENS, WIDTH)))
    with pytest.raises(UserError) as refused:
        context.mean(y.sum(), torch.ones(y.shape[:2]))
    return str(refused.value)


@pytest.mark.parametrize("degree", [1, 2])
def test_a_context_that_is_not_bound_is_refused(degree: int) -> None:
    for said in on_ranks(4, _unbound, degree):
        assert "context.bind(module)" in said


def _beside(frozen: bool) -> list[torch.Tensor]:
    """Means of a student's loss, whose teacher of another scheme is bound to the same Context."""
    topology = lowband.Topology({"node": 2}, lowband.Axes(context=2))
    context = lowband.Context(topology)
    torch.manual_seed(0)
    student, teacher = Layer(context), Layer(context).requires_grad_(not frozen)
    for layer, scheme in ((student, SEPARATE), (teacher, CONFIG.scheme("zero3"))):
        context.bind(layer)
        lowband.shard(layer, scheme, topology, nn.Linear, compute_dtype=torch.float32)
    counted = torch.arange(TOKENS // 2) < 1 + 2 * (dist.get_rank() // 2)
    return [context.mean(counted.sum().float(), counted)]


def test_a_frozen_teacher_changes_no_mean() -> None:
    """On each replica ones are averaged, which makes 1."""
    found = [means for [means] in on_ranks(4, _beside, True)]
    assert [float(a + b) / 2 for a, b in (found[:2], found[2:])] == [1.0, 1.0]


def _two_means() -> str:
    with pytest.raises(UserError) as refused:
        _beside(frozen=False)
    return str(refused.value)


def test_a_context_of_two_means_is_refused() -> None:
    for said in on_ranks(4, _two_means):
        assert "average over 'node' and over 'world'" in said
