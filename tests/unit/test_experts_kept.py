"""What a layer of experts on one rank keeps for its backward, beside the closed form."""

import pytest
import torch

from lowband.cost.activations import kept_bytes_per_token
from lowband.engine.parallel.experts import MixtureOfExperts
from lowband.spec.model import ModelSpec
from lowband.spec.routing import Routing

HIDDEN, WIDTH, EXPERTS = 64, 96, 8


def kept(tokens: int, top_k: int, gated: bool) -> int:
    """Bytes of all storages that autograd keeps, but for parameters'."""
    layer = MixtureOfExperts(HIDDEN, WIDTH, Routing(EXPERTS, top_k), gated=gated).to(torch.bfloat16)
    own = {parameter.untyped_storage().data_ptr() for parameter in layer.parameters()}
    found: dict[int, torch.UntypedStorage] = {}

    def pack(saved: torch.Tensor) -> torch.Tensor:
        storage = saved.untyped_storage()
        found.setdefault(storage.data_ptr(), storage)
        return saved

    x = torch.randn(tokens, HIDDEN, dtype=torch.bfloat16, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda saved: saved):
        out = layer(x)
    assert out.shape == x.shape
    return sum(storage.nbytes() for place, storage in found.items() if place not in own)


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("top_k", [1, 2, 4])
def test_a_layer_of_experts_keeps_what_is_counted(top_k: int, gated: bool) -> None:
    """Within 3 %: places of rows and weights of pairs are left out."""
    a_token = (kept(1024, top_k, gated) - kept(512, top_k, gated)) / 512
    model = ModelSpec(
        name="layer", layers=1, hidden=HIDDEN, heads=1, vocab=8, seq_len=8, experts=EXPERTS, top_k=top_k,
        expert_hidden=WIDTH, gated=gated, source="none",
    )  # fmt: skip
    beside = 2 * 3 * HIDDEN + 2 * 3 * HIDDEN + 2 * HIDDEN + 4  # of attention, and norms' inputs
    expected = kept_bytes_per_token(model, 8, "none", "flash").block - beside
    assert a_token == pytest.approx(expected, rel=0.03)
