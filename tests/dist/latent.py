"""A GPT with multi-head latent attention, under the names of `ModelSpec.block_shapes`, for one device."""

import torch
import torch.nn.functional as F
from torch import nn

from lowband.model.gpt import GPT, rotate
from lowband.spec.attention import Latent
from lowband.spec.model import ModelSpec

SPEC = ModelSpec(
    name="latent", layers=2, hidden=32, heads=4, vocab=64, seq_len=16, source="none", positions="rotary",
    latent=Latent(kv_rank=8, q_rank=12, rope=4, nope=6, value=8),
)  # fmt: skip


class LatentAttention(nn.Module):
    """Of DeepSeek-V2 (arXiv 2405.04434, section 2.1)."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        assert spec.latent is not None
        self.of = of = spec.latent
        self.q_down, self.q_norm = nn.Linear(spec.hidden, of.q_rank or 0), nn.LayerNorm(of.q_rank or 0)
        name, rank = ("q", spec.hidden) if of.q_rank is None else ("q_up", of.q_rank)
        if of.q_rank is None:
            del self.q_down, self.q_norm
        self.add_module(name, nn.Linear(rank, spec.heads * of.query))
        self.kv_down, self.kv_norm = nn.Linear(spec.hidden, of.kv_rank + of.rope), nn.LayerNorm(of.kv_rank)
        self.k_rope = nn.Identity()
        self.kv_up = nn.Linear(of.kv_rank, spec.heads * (of.nope + of.value))
        self.out = nn.Linear(spec.heads * of.value, spec.hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        of = self.of
        q = self.q(x) if of.q_rank is None else self.q_up(self.q_norm(self.q_down(x)))
        short, k_rope = self.kv_down(x).split([of.kv_rank, of.rope], -1)
        kv, k_rope = self.kv_up(self.kv_norm(short)), self.k_rope(k_rope)
        q, kv = (each.unflatten(-1, (-1, width)).transpose(1, 2)
                 for each, width in ((q, of.query), (kv, of.nope + of.value)))  # fmt: skip
        k, v = kv.split([of.nope, of.value], -1)
        q_nope, q_rope = q.split([of.nope, of.rope], -1)
        k_rope = rotate(k_rope.unsqueeze(1)).expand(-1, q.shape[1], -1, -1)
        q, k = torch.cat([q_nope, rotate(q_rope)], -1), torch.cat([k, k_rope], -1)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).flatten(2))


def latent_gpt(spec: ModelSpec = SPEC) -> GPT:
    """With values that depend on nothing else."""
    torch.manual_seed(3)
    model = GPT(spec)
    for block in model.blocks:
        block.attention = LatentAttention(spec)
    return model
