"""Tiny models of Hugging Face's classes, built from their configurations, and LoRA around two of them."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import peft
import torch
import transformers
from torch import nn
from transformers.models.bert.modeling_bert import BertLayer
from transformers.models.gpt2.modeling_gpt2 import GPT2Block
from transformers.models.llama.modeling_llama import LlamaDecoderLayer
from transformers.models.mamba.modeling_mamba import MambaBlock
from transformers.models.mixtral.modeling_mixtral import MixtralDecoderLayer
from transformers.models.t5.modeling_t5 import T5Block
from transformers.models.vit.modeling_vit import ViTLayer

from tests.wide.cases import Case

VOCABULARY, WIDTH, LENGTH, CLASSES = 29, 16, 6, 5
SIZES = {
    "vocab_size": VOCABULARY, "hidden_size": WIDTH, "intermediate_size": 24, "num_hidden_layers": 2,
    "num_attention_heads": 4, "max_position_embeddings": 16, "use_cache": False,
}  # fmt: skip
NO_ENDS = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}


def _attention(case: Case) -> dict[str, str]:
    return {"attn_implementation": "eager"} if case.has_side_outputs else {}  # the only one that returns maps


def _llama(case: Case) -> nn.Module:
    options = {"num_key_value_heads": 2, "tie_word_embeddings": case.is_tied, "initializer_range": 0.1}
    config = transformers.LlamaConfig(**SIZES, **options, **NO_ENDS, **_attention(case))
    return transformers.LlamaForCausalLM(config)


def _mixtral(case: Case) -> nn.Module:
    options = {"num_key_value_heads": 2, "num_local_experts": 3, "initializer_range": 0.1}
    options |= {"output_router_logits": case.has_side_outputs, "tie_word_embeddings": case.is_tied}
    return transformers.MixtralForCausalLM(
        transformers.MixtralConfig(**SIZES, **options, **NO_ENDS, router_aux_loss_coef=0.1)
    )


def _gpt2(case: Case) -> nn.Module:
    dropout = 0.1 if case.has_dropout else 0.0
    config = transformers.GPT2Config(
        vocab_size=VOCABULARY, n_positions=16, n_embd=WIDTH, n_layer=2, n_head=2, use_cache=False,
        resid_pdrop=dropout, embd_pdrop=dropout, attn_pdrop=dropout, initializer_range=0.1,
        tie_word_embeddings=case.is_tied, **NO_ENDS, **_attention(case),
    )  # fmt: skip
    return transformers.GPT2LMHeadModel(config)


def _t5(case: Case) -> nn.Module:
    config = transformers.T5Config(
        vocab_size=VOCABULARY, d_model=WIDTH, d_kv=4, d_ff=24, num_layers=2, num_heads=2, use_cache=False,
        dropout_rate=0.1 if case.has_dropout else 0.0, initializer_factor=0.3, decoder_start_token_id=0,
        pad_token_id=0, eos_token_id=None, tie_word_embeddings=case.is_tied,
    )  # fmt: skip
    return transformers.T5ForConditionalGeneration(config)


def _dropouts(case: Case) -> dict[str, float]:
    share = 0.1 if case.has_dropout else 0.0
    return {"hidden_dropout_prob": share, "attention_probs_dropout_prob": share, "initializer_range": 0.1}


def _bert(case: Case) -> nn.Module:
    sizes = {name: size for name, size in SIZES.items() if name != "use_cache"}
    config = transformers.BertConfig(
        **sizes, **_dropouts(case), tie_word_embeddings=case.is_tied, **_attention(case)
    )
    return transformers.BertForMaskedLM(config)


def _vit(case: Case) -> nn.Module:
    names = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    config = transformers.ViTConfig(
        **{name: SIZES[name] for name in names}, **_dropouts(case), image_size=8, patch_size=4,
        num_labels=CLASSES,
    )  # fmt: skip
    return transformers.ViTForImageClassification(config)


def _mamba(case: Case) -> nn.Module:
    config = transformers.MambaConfig(
        vocab_size=VOCABULARY, hidden_size=WIDTH, state_size=4, num_hidden_layers=2, expand=2,
        time_step_rank=3, use_cache=False, tie_word_embeddings=case.is_tied, use_mambapy=False,
    )  # fmt: skip
    return transformers.MambaForCausalLM(config)


def _with_lora(base: Callable[[Case], nn.Module], names: list[str]) -> Callable[[Case], nn.Module]:
    def make(case: Case) -> nn.Module:
        # The second matrices are not zeros, so that all adapters have gradients from the first step on.
        config = peft.LoraConfig(
            r=2, lora_alpha=4, target_modules=names, init_lora_weights=False,
            lora_dropout=0.1 if case.has_dropout else 0.0, fan_in_fan_out="c_attn" in names,
        )  # fmt: skip
        return peft.get_peft_model(base(case), config)

    return make


def _tokens(draws: torch.Generator) -> torch.Tensor:
    return torch.randint(1, VOCABULARY, (2, LENGTH), generator=draws)


def _language(draws: torch.Generator) -> dict[str, Any]:
    tokens = _tokens(draws)
    return {"input_ids": tokens, "labels": tokens}


def _translation(draws: torch.Generator) -> dict[str, Any]:
    return {"input_ids": _tokens(draws), "labels": _tokens(draws)[:, :4].contiguous()}


def _images(draws: torch.Generator) -> dict[str, Any]:
    images = torch.randn(3, 3, 8, 8, generator=draws)
    return {"pixel_values": images, "labels": torch.randint(CLASSES, (3,), generator=draws)}


@dataclass(frozen=True)
class Family:
    make: Callable[[Case], nn.Module]
    unit: type[nn.Module]
    batch: Callable[[torch.Generator], dict[str, Any]] = _language


FAMILIES = {
    "llama": Family(_llama, LlamaDecoderLayer),
    "gpt2": Family(_gpt2, GPT2Block),
    "t5": Family(_t5, T5Block, _translation),
    "bert": Family(_bert, BertLayer),
    "vit": Family(_vit, ViTLayer, _images),
    "mixtral": Family(_mixtral, MixtralDecoderLayer),
    "mamba": Family(_mamba, MambaBlock),
    "lora llama": Family(_with_lora(_llama, ["q_proj", "v_proj", "down_proj"]), LlamaDecoderLayer),
    "lora gpt2": Family(_with_lora(_gpt2, ["c_attn"]), GPT2Block),
}


class Methods(nn.Module):
    """What docs/library.md says to do where another method than forward uses parameters."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, method: str, *args: Any, **kwargs: Any) -> Any:
        return getattr(self.model, method)(*args, **kwargs)


def module_of(case: Case) -> nn.Module:
    model = FAMILIES[case.net].make(case)
    if case.checkpointing != "none":
        if case.net.startswith("lora"):
            model.enable_input_require_grads()  # else nothing that trains precedes a checkpointed layer
        model.gradient_checkpointing_enable({"use_reentrant": case.checkpointing == "reentrant"})
    return Methods(model) if case.generation == "inside" else model


def loss_of(module: nn.Module, case: Case, batch: dict[str, Any]) -> torch.Tensor:
    takes_maps = case.has_side_outputs and case.net != "mixtral"  # which adds up its router's loss itself
    if takes_maps:
        batch = batch | {"output_attentions": True}
    output = module("forward", **batch) if case.generation == "inside" else module(**batch)
    if not takes_maps:
        return output.loss
    return output.loss + sum(each.square().mean() for each in output.attentions)


def generated(module: nn.Module, case: Case, tokens: torch.Tensor) -> torch.Tensor:
    """As many tokens on every rank."""
    options = {"input_ids": tokens, "max_new_tokens": 3, "min_new_tokens": 3, "do_sample": False}
    options |= {"use_cache": True, "pad_token_id": 0}
    with torch.no_grad():
        if case.generation == "inside":
            return module("generate", **options)
        return module.generate(**options)
