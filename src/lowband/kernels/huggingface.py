"""Our attention in Hugging Face models: `attn_implementation="lowband"`.

Sliding windows, softcaps, grouped queries and the head size are as the model's configuration says; several
documents in a row (position_ids that begin again) and padding cost no mask of T x T.
"""

from itertools import pairwise
from typing import Any, NamedTuple

import torch

from lowband.errors import UserError
from lowband.kernels.flash_attention import attention
from lowband.kernels.spans import Spans, spans

UNSERVED = ("position_bias", "s_aux", "cache")


class Made(NamedTuple):
    """Of what spans were made: these tensors, not written to since, and sizes."""

    tensors: tuple[torch.Tensor | None, ...]
    versions: tuple[int, ...]
    sizes: tuple[int, ...]

    def are(self, other: "Made") -> bool:
        same = all(a is b for a, b in zip(self.tensors, other.tensors, strict=True))
        return same and (self.versions, self.sizes) == (other.versions, other.sizes)


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
        tensors, sizes = (mask, positions), (query.shape[2], key.shape[2], int(is_causal))
        given = Made(tensors, tuple(0 if x is None else x._version for x in tensors), sizes)
        made = self._made.get(window)
        if made is None or not made[0].are(given):
            keys = documents(mask, positions, key.shape[2])
            left = None if window is None else window - 1  # Hugging Face counts the query's own key
            queries = keys
            if query.shape[2] != key.shape[2]:  # of a generation: the last tokens of the last document
                queries = [only_last(lengths, query.shape[2]) for lengths in keys]
            right = left if not is_causal else 0
            seen = spans(queries, keys, is_causal, (left, right)).to(query.device)
            made = self._made[window] = given, seen
        return made[1]


def documents(mask: torch.Tensor | None, positions: torch.Tensor | None, length: int) -> list[list[int]]:
    """The lengths of each sequence's documents; padding before and behind it is one of its own.

    mask: [B, length] or None; positions: [B or 1, length], beginning anew at each document, or None
    """
    if mask is not None:
        begins = mask[:, 1:] != mask[:, :-1]
        if (begins.sum(1) > 2).any():
            raise UserError("padding inside a sequence", where="attn_implementation lowband")
    elif positions is not None and positions.shape[1] == length:
        begins = positions.diff(dim=1) != 1
    else:
        return [[length]]
    found = []
    for row in begins.tolist():
        cuts = [0, *(i + 1 for i, begin in enumerate(row) if begin), length]
        found.append([end - start for start, end in pairwise(cuts)])
    most = max(map(len, found))
    return [lengths + [0] * (most - len(lengths)) for lengths in found]


def only_last(lengths: list[int], tokens: int) -> list[int]:
    """So many tokens of the last of these documents that has any, none of the others."""
    last = max(i for i, length in enumerate(lengths) if length)
    return [tokens if i == last else 0 for i in range(len(lengths))]


def register() -> None:
    """From here on `attn_implementation="lowband"` is known to every model of transformers."""
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface, flash_attention_mask

    AttentionInterface.register("lowband", Attention())
    # It makes a 2D mask where there is padding. Without any such function padding would be dropped.
    AttentionMaskInterface.register("lowband", flash_attention_mask)
