"""Lowband's attention in Hugging Face models: `attn_implementation="lowband"`.

python examples/hf_attention.py                  # a tiny Gemma 2, beside eager attention
python examples/hf_attention.py FOLDER --bf16    # a model of yours, from what save_pretrained wrote

It needs a GPU, or TRITON_INTERPRET=1 for the tiny model on a CPU. Sliding windows, softcaps, grouped queries
and the head size are as the model's configuration says; several documents in a row (position_ids that begin
again) and padding cost no mask of T x T.
"""

import argparse
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from transformers import AttentionInterface, AutoModelForCausalLM, Gemma2Config, PreTrainedModel
from transformers.masking_utils import AttentionMaskInterface, flash_attention_mask

import lowband
from lowband.kernels.flash_attention import attention
from lowband.kernels.spans import Spans, spans

LENGTH = 40
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
            raise lowband.UserError(f"{unserved[0]} in attention", where="attn_implementation lowband")
        if dropout and module.training:
            raise lowband.UserError(
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
            raise lowband.UserError("padding inside a sequence", where="attn_implementation lowband")
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
    AttentionInterface.register("lowband", Attention())
    # It makes a 2D mask where there is padding. Without any such function padding would be dropped.
    AttentionMaskInterface.register("lowband", flash_attention_mask)


def tiny() -> PreTrainedModel:
    config = Gemma2Config(
        vocab_size=256, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=24, query_pre_attn_scalar=24, sliding_window=12,
        attn_logit_softcapping=5.0, layer_types=["sliding_attention", "full_attention"],
        max_position_embeddings=256,
    )  # fmt: skip
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config)


def batches(vocab: int) -> dict[str, dict[str, torch.Tensor]]:
    """Two sequences each: whole ones, several documents in a row, padding behind and before."""
    tokens = torch.randint(vocab, (2, LENGTH), generator=torch.Generator().manual_seed(1))
    real = torch.arange(LENGTH).expand(2, -1)
    padded = torch.stack([real[0] < 31, real[1] >= 20])
    return {
        "whole": {"input_ids": tokens, "labels": tokens},
        "documents": {
            "input_ids": tokens, "labels": tokens, "position_ids": torch.stack([real[0], real[1] % 19]),
        },
        "padding": {
            "input_ids": tokens, "labels": tokens.masked_fill(~padded | ~padded.roll(1, 1), -100),
            "attention_mask": padded.long(),
            "position_ids": (padded.long().cumsum(1) - 1).clamp(min=0),
        },
    }  # fmt: skip


def step(
    model: PreTrainedModel, attend: str, batch: dict[str, torch.Tensor]
) -> tuple[float, list[torch.Tensor]]:
    """The loss, and a copy of all gradients."""
    model.set_attn_implementation(attend)
    model.zero_grad(set_to_none=True)
    loss = model(**batch, use_cache=False).loss
    loss.backward()
    return float(loss.detach()), [x.grad.clone() for x in model.parameters() if x.grad is not None]


@lowband.one_line_errors()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", nargs="?", help="default: a tiny Gemma 2 with random weights")
    parser.add_argument("--bf16", action="store_true", help="on a GPU")
    options = parser.parse_args()
    register()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = AutoModelForCausalLM.from_pretrained(options.folder) if options.folder else tiny()
    model = model.to(device, torch.bfloat16 if options.bf16 else torch.float32).train()
    for name, batch in batches(model.config.vocab_size).items():
        given = {key: value.to(device) for key, value in batch.items()}
        loss, wanted = step(model, "eager", given)
        ours, found = step(model, "lowband", given)
        off = max(float((a - b).abs().max()) for a, b in zip(found, wanted, strict=True))
        most = max(float(x.abs().max()) for x in wanted)
        print(
            f"{name}: loss {loss:.6f}, with lowband's attention {ours:.6f}; "
            f"gradients differ by {off / most:.1e}"
        )


if __name__ == "__main__":
    main()
