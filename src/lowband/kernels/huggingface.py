"""Our attention in Hugging Face models: `attn_implementation="lowband"`.

Sliding windows, softcaps, grouped queries and the head size are as the model's configuration says; several
documents in a row (position_ids that begin again) and padding cost no mask of T x T.
"""

from itertools import pairwise
from typing import Any, NamedTuple

import torch

from lowband.errors import UserError
from lowband.kernels.flash_attention import attention
from lowband.kernels.spans import Spans, bounded, spans

UNSERVED = ("position_bias", "s_aux", "cache")


class Made(NamedTuple):
    """Of what spans were made: these tensors, as they were, and sizes."""

    tensors: tuple[torch.Tensor | None, ...]
    sizes: tuple[int, ...]
    versions: tuple[int, ...] | None

    @classmethod
    def of(cls, tensors: tuple[torch.Tensor | None, ...], sizes: tuple[int, ...]) -> "Made":
        there = [x for x in tensors if x is not None]
        is_known = not any(x.is_inference() for x in there)  # of those torch counts no writes in place
        return cls(tensors, sizes, tuple(x._version for x in there) if is_known else None)

    def are(self, other: "Made") -> bool:
        same = all(a is b for a, b in zip(self.tensors, other.tensors, strict=True))
        return same and self.versions is not None and self[1:] == other[1:]


class Attention:
    """What `AttentionInterface` calls in each layer. Spans are made once a batch and window."""

    def __init__(self) -> None:
        self._made: dict[int | None, tuple[Made, Spans]] = {}

    def __call__(
        self,
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        scaling: float | None = None,
        dropout: float = 0.0,
        sliding_window: int | None = None,
        softcap: float | None = None,
        is_causal: bool | None = None,
        position_ids: torch.Tensor | None = None,
        **others: Any,
    ) -> tuple[torch.Tensor, None]:
        """query [B, N, Tq, D], key and value [B, G, Tk, D] -> [B, Tq, N, D].

        attention_mask: [B, Tk] bool, False for padding before or behind a sequence; None: there is none
        Raises UserError for what the kernels do not compute.
        """
        if unserved := [name for name in UNSERVED if others.get(name) is not None]:
            raise UserError(f"{unserved[0]} in attention", where="attn_implementation lowband")
        if dropout and module.training:
            raise UserError(
                f"dropout {dropout} of attention", where="attn_implementation lowband",
                allowed="attention_dropout 0 in the model's configuration",
            )  # fmt: skip
        is_causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
        seen = self._spans(query, key, attention_mask, position_ids, sliding_window, is_causal)
        out = attention(query, key, value, scale=scaling, spans=seen, softcap=softcap)
        return out.transpose(1, 2).contiguous(), None

    def _spans(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        mask: torch.Tensor | None,
        positions: torch.Tensor | None,
        window: int | None,
        is_causal: bool,
    ) -> Spans:
        given = Made.of((mask, positions), (query.shape[2], key.shape[2], int(is_causal)))
        made = self._made.get(window)
        if made is None or not made[0].are(given):
            lengths = query.shape[2], key.shape[2]
            near = None if window is None else window - 1  # Hugging Face counts the query's own key
            if mask is None:
                seen = of_documents(positions, *lengths, is_causal, near)
            else:
                seen = of_real_keys(mask, lengths[0], is_causal, near)
            made = self._made[window] = given, seen.to(query.device)
        return made[1]


def of_documents(
    positions: torch.Tensor | None, queries: int, keys: int, is_causal: bool, near: int | None
) -> Spans:
    """Each query sees its own document. positions: [B or 1, keys], beginning anew at each document, or None

    near: how many keys before its own a query sees, and without is_causal after it; None: all
    """
    if positions is None or positions.shape[1] != queries or queries != keys:
        return spans([[queries]], [[keys]], is_causal, (near, near))
    found = []
    for row in (positions.diff(dim=1) != 1).tolist():
        cuts = [0, *(i + 1 for i, begins in enumerate(row) if begins), keys]
        found.append([end - start for start, end in pairwise(cuts)])
    return spans(found, is_causal=is_causal, window=(near, near))


def of_real_keys(mask: torch.Tensor, queries: int, is_causal: bool, near: int | None) -> Spans:
    """Each query, of padding too, sees the keys that are no padding.

    mask: [B, keys] bool, False for padding. Raises UserError for another one, and for padding between tokens.
    """
    if mask.dim() != 2:
        what = f"a mask of shape {list(mask.shape)}"
        raise UserError(what, where="attn_implementation lowband", allowed="[B, keys], False for padding")
    mask = mask.bool().cpu()
    keys = mask.shape[1]
    if (mask.diff(dim=1, prepend=torch.zeros_like(mask[:, :1])) & mask).sum(1).gt(1).any():
        what = "padding inside a sequence"  # where no mask is given, generate() takes its pad_token_id for it
        raise UserError(what, where="attn_implementation lowband", allowed="before and behind its tokens")
    start = mask.int().argmax(1, keepdim=True)
    stop = start + mask.sum(1, keepdim=True)
    own = torch.arange(keys - queries, keys).expand(len(mask), -1)  # the last query's own key is the last one
    after = 0 if is_causal else near
    end = stop.expand_as(own) if after is None else torch.minimum(stop, own + after + 1).clamp(min=0)
    first = start.expand_as(own) if near is None else torch.maximum(start, own - near)
    return bounded(torch.minimum(first, end), end, keys)


def register() -> None:
    """From here on `attn_implementation="lowband"` is known to every model of transformers."""
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface, flash_attention_mask

    AttentionInterface.register("lowband", Attention())
    # It makes a 2D mask where there is padding. Without any such function padding would be dropped.
    AttentionMaskInterface.register("lowband", flash_attention_mask)
