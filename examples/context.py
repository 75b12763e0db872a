"""Attention whose tokens may lie on several ranks, as `lowband check-context examples/context.py` checks it.

`make(context)` is the module; without a context it has all tokens. What differs is where attention is
called, and which positions its tokens have. `inputs()` is a batch: 30 tokens, which four ranks do not divide.
"""

import torch
import torch.nn.functional as F
from torch import nn

import lowband

HEADS, KEYS, WIDTH = 4, 2, 32


class Attention(nn.Module):
    """Causal, with two heads of queries to one of keys, and learned positions."""

    def __init__(self, context: lowband.Context | None) -> None:
        super().__init__()
        self.context, head = context, WIDTH // HEADS
        self.position = nn.Embedding(1024, WIDTH)
        self.q = nn.Linear(WIDTH, WIDTH, bias=False)
        self.kv = nn.Linear(WIDTH, 2 * KEYS * head, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        places = torch.arange(x.shape[1]) if self.context is None else self.context.places(x)
        x = x + self.position(places)
        q, k, v = (
            y.unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2)
            for y in (self.q(x), *self.kv(x).chunk(2, -1))
        )
        if self.context is None:
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        else:
            y = self.context.attention(q, k, v)
        out: torch.Tensor = self.out(y.transpose(1, 2).flatten(2))
        return out


def make(context: lowband.Context | None) -> nn.Module:
    return Attention(context)


def inputs() -> torch.Tensor:
    return torch.randn(2, 30, WIDTH)
