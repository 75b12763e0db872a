"""What PEFT's adapters have, compute and keep, as cost/lora.py counts it."""

from itertools import combinations
from typing import Any

import pytest
import torch
from kept import NORM_STATISTICS, kept_by
from test_recompute import BATCH, MODEL, inputs
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from lowband.cost.activations import kept_bytes_per_token
from lowband.cost.flops import block_matmul_flops_per_token
from lowband.cost.lora import MATRICES, Lora
from lowband.model.gpt import GPT
from lowband.run.on_ranks import on_ranks
from lowband.spec.model import ModelSpec

RANK = 4
GATED = ModelSpec(
    name="gated", layers=2, hidden=64, heads=4, kv_heads=2, head_dim=24, vocab=96, seq_len=32, mlp_hidden=160,
    gated=True, positions="rotary", tied_head=False, biases=False, source="test",
)  # fmt: skip
MODULES = {
    "q": "q_proj", "k": "k_proj", "v": "v_proj", "out": "o_proj", "gate": "gate_proj", "up": "up_proj",
    "down": "down_proj",
}  # fmt: skip


def llama(attention: str) -> nn.Module:
    from transformers import LlamaConfig, LlamaModel

    spec = GATED
    shape = LlamaConfig(
        hidden_size=spec.hidden, num_hidden_layers=spec.layers, num_attention_heads=spec.heads,
        num_key_value_heads=spec.kv_heads, head_dim=spec.head_dim, intermediate_size=spec.mlp_width,
        vocab_size=spec.vocab, attn_implementation=attention,
    )  # fmt: skip
    return LlamaModel(shape).bfloat16()


def adapted(model: nn.Module, modules: list[str]) -> nn.Module:
    from peft import LoraConfig, inject_adapter_in_model

    inject_adapter_in_model(LoraConfig(r=RANK, target_modules=modules), model)
    return model.bfloat16()


def of_gpt(on: list[str]) -> int:
    """Bytes that blocks of our GPT keep, whose queries, keys and values are one matrix."""
    model = GPT(MODEL, recompute="none").bfloat16()
    adapted(model, [{"out": "attention.out"}.get(name, f"mlp.{name}") for name in on])
    return kept_by(model, nn.Sequential(*model.blocks), inputs(MODEL.seq_len))


def of_llama(attention: str, choices: list[list[str]]) -> list[tuple[int, int]]:
    """Of each choice of matrices parameters that are trained, and bytes that a Llama's blocks keep."""
    found = []
    for on in choices:
        model = adapted(llama(attention), [MODULES[name] for name in on])
        trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
        layer: Any = lambda x, model=model: model(inputs_embeds=x, use_cache=False)  # noqa: E731
        found.append((trained, kept_by(model, layer, inputs(GATED.seq_len))))
    return found


def flops_of(on: list[str]) -> list[int]:
    """Of matrix products of a Llama's blocks, forward and backward, before and with adapters."""
    found = []
    x = torch.randn(1, GATED.seq_len, GATED.hidden, dtype=torch.bfloat16, requires_grad=True)
    for modules in ([], [MODULES[name] for name in on]):
        model = adapted(llama("eager"), modules) if modules else llama("eager")
        with FlopCounterMode(display=False) as counter:
            model(inputs_embeds=x, use_cache=False).last_hidden_state.sum().backward()
        products = counter.get_flop_counts()["Global"]
        found.append(sum(count for name, count in products.items() if "bmm" not in str(name)))
    return found


ONE_BY_ONE = [pytest.param([name], marks=pytest.mark.wide) for name in ("out", "up", "down")]
PLAIN = pytest.param("eager", "plain", marks=pytest.mark.wide)


@pytest.mark.parametrize("on", [["out", "up"], *ONE_BY_ONE])
def test_a_frozen_matrix_keeps_no_input(on: list[str]) -> None:
    per_token = kept_bytes_per_token(MODEL, MODEL.seq_len, "none", "flash", lora=Lora(RANK, on)).block
    [found] = on_ranks(1, of_gpt, on)
    assert found == (per_token + NORM_STATISTICS) * BATCH * MODEL.seq_len * MODEL.layers


def of_both(attention: str, choices: list[list[str]]) -> tuple[list[tuple[int, int]], list[int]]:
    return of_llama(attention, choices), flops_of(choices[-2])


@pytest.mark.parametrize(("attention", "kind"), [("sdpa", "flash"), PLAIN])
def test_adapters_have_keep_and_compute_what_the_closed_form_says(attention: str, kind: Any) -> None:
    """Bytes beside those of adapters of one matrix: norms of transformers keep more than a fused one. Of
    products with frozen matrices two of three are left, of those with adapters there are all three."""
    five = map(list, combinations(MATRICES, 5))
    choices = [["down"], *([name] for name in MATRICES[:-1]), *five, [*MATRICES]]
    [(found, (trained, frozen))] = on_ranks(1, of_both, attention, choices)
    _, first = found[0]
    kept = [
        kept_bytes_per_token(GATED, GATED.seq_len, "none", kind, lora=Lora(RANK, on)).block for on in choices
    ]
    parameters = [GATED.layers * Lora(RANK, on).parameters(GATED) for on in choices]
    blocks = BATCH * GATED.seq_len * GATED.layers
    expected = [first + (each - kept[0]) * blocks for each in kept]
    assert found == list(zip(parameters, expected, strict=True))
    assert trained == GATED.seq_len * 3 * GATED.layers * block_matmul_flops_per_token(GATED)
    assert frozen == trained * 2 // 3 + GATED.seq_len * 6 * parameters[-2]
