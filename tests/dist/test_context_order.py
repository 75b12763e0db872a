"""A ring's messages are on their way while attention computes, in forward and in backward."""

from typing import Any

import pytest
import torch

import lowband
from lowband.engine.collectives.context import ContextExchanges, Passing
from lowband.engine.parallel import blocks
from lowband.run.on_ranks import on_ranks
from lowband.spec.step import Collective


def _order(ranks: int, way: str) -> list[str]:
    """What a rank does in one forward and backward, in its order: compute, row sent, row waited for."""
    context = lowband.Context(lowband.Topology({"node": 2}, lowband.Axes(context=ranks)), way)
    done: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        pass_on, wait = ContextExchanges.pass_on, Passing.wait

        def sent(self: ContextExchanges, x: torch.Tensor, row: Collective, name: str) -> Passing:
            passing = pass_on(self, x, row, name)
            passing.row = row.name  # type: ignore[attr-defined]
            done.append(f"{row.name} sent")
            return passing

        def waited(self: Passing) -> torch.Tensor:
            done.append(f"{self.row} here")  # type: ignore[attr-defined]
            return wait(self)

        def computed(name: str) -> Any:
            compute = getattr(blocks, name)

            def noted(*arguments: Any) -> Any:
                if done[-1:] != [name]:
                    done.append(name)
                return compute(*arguments)

            return noted

        patch.setattr(ContextExchanges, "pass_on", sent)
        patch.setattr(Passing, "wait", waited)
        for name in ("forward", "backward"):
            patch.setattr(blocks, name, computed(name))
        q = torch.randn(1, 2, 8, 4, requires_grad=True)
        context.attention(q, q, q).sum().backward()
    return done


RING = [
    "context_ring sent", "forward", "context_ring here", "forward",
    "context_ring_again sent", "backward", "context_ring_grad sent", "context_ring_again here",
    "backward", "context_ring_grad here", "context_ring_grad sent", "context_ring_grad here",
]  # fmt: skip


@pytest.mark.parametrize(("ranks", "way"), [(2, "ring"), (4, "node=gather,world=ring")])
def test_messages_travel_behind_attention(ranks: int, way: str) -> None:
    """Keys and values behind the block at hand, gradients behind the next one, and home at the end."""
    for found in on_ranks(ranks, _order, ranks, way):
        assert found == RING
