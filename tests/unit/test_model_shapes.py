"""Shapes beyond a GPT's: published counts of parameters, FLOPs as torch counts them, windows pair by pair."""

import math

import numpy as np
import pytest
import torch
import transformers
from torch.utils.flop_counter import FlopCounterMode

from lowband.cost.activations import kept_bytes_per_token
from lowband.cost.flops import block_matmul_flops_per_token, keys_seen, model_flops_per_token
from lowband.errors import UserError
from lowband.predict.prediction import predict
from lowband.predict.request import job_of, setting
from lowband.spec.axes import Ways
from lowband.spec.model import ModelSpec
from tests.checkout import CONFIG

# Billions of parameters that the weights' pages or papers state, and of those that a token meets.
PUBLISHED = {
    "mistral-7b": (7.24, None), "llama-3-405b": (405.85, None), "llama-4-maverick": (400.7, 17.2),
    "qwen3-8b": (8.19, None), "qwen3-30b-a3b": (30.53, 3.3), "qwen3-235b-a22b": (235.1, 22.2),
    "gemma-2-9b": (9.24, None), "gpt-oss-20b": (20.91, 3.6), "gpt-oss-120b": (116.83, 5.1),
    "deepseek-v2-lite": (15.71, 2.7), "deepseek-v3": (671.03, 37.6),
}  # fmt: skip


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameters_are_the_published_ones(name: str) -> None:
    model, (whole, met) = CONFIG.model(name), PUBLISHED[name]
    assert model.parameters / 1e9 == pytest.approx(whole, rel=2e-3)
    if met is not None:
        active = model.parameters - (model.layers - model.dense_layers) * model.idle_elements
        # gpt-oss and DeepSeek's first count without an embedding
        without = active - model.vocab * model.hidden
        assert min(abs(each / 1e9 / met - 1) for each in (active, without)) < 0.02


TINY = {"name": "t", "layers": 3, "hidden": 64, "heads": 4, "vocab": 300, "seq_len": 128, "source": "ours"}
LLAMA = {**TINY, "positions": "rotary", "gated": True, "biases": False, "tied_head": False, "mlp_hidden": 96}
HF = {
    "hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "vocab_size": 300,
    "intermediate_size": 96, "max_position_embeddings": 128, "attn_implementation": "eager",
}  # fmt: skip
LATENT = {"kv_rank": 16, "q_rank": 24, "rope": 8, "nope": 12, "value": 20}
COUNTED = {
    "qwen3": (
        {**HF, "num_key_value_heads": 2, "head_dim": 32}, {"head_dim": 32, "kv_heads": 2, "qk_norm": True},
    ),
    "cohere": ({**HF, "num_key_value_heads": 2}, {"kv_heads": 2, "parallel_block": True}),
    "deepseek_v3": (
        {
            **HF, "num_key_value_heads": 4, "kv_lora_rank": 16, "q_lora_rank": 24, "qk_rope_head_dim": 8,
            "qk_nope_head_dim": 12, "v_head_dim": 20, "first_k_dense_replace": 3,
        },
        {"latent": LATENT},
    ),
}  # fmt: skip


@pytest.mark.parametrize("family", COUNTED)
def test_flops_are_those_that_torch_counts(family: str) -> None:
    theirs, ours = COUNTED[family]
    tokens, spec = 128, ModelSpec.parse({**LLAMA, **ours}, "test")
    config = transformers.AutoConfig.for_model(family, **theirs)
    with torch.device("meta"):
        module = transformers.AutoModelForCausalLM.from_config(config)
        with FlopCounterMode(display=False) as counter:
            module(torch.zeros(1, tokens, dtype=torch.long))
    vectors = sum(math.prod(s) for unit in spec.unit_shapes() for s in unit if len(s) == 1)
    assert 3 * counter.get_total_flops() / tokens + 6 * vectors == model_flops_per_token(spec, tokens)


def pairs(tokens: int, window: int, chunked: bool) -> int:
    q, k = np.indices((tokens, tokens))
    near = q // window == k // window if chunked else q - k < window
    return int(((k <= q) & near).sum())


@pytest.mark.parametrize("chunked", [False, True])
@pytest.mark.parametrize("window", [64, 256, 1024])
def test_keys_in_windows(window: int, chunked: bool) -> None:
    tokens, base = 1024, ModelSpec.parse(LLAMA, "test")
    model = base.model_copy(update={"window": window, "chunked": chunked})
    # In the limit of many tokens: a query's own key is counted half, as in T / 2 of T (T + 1) / 2 pairs.
    exact = 2 * (pairs(tokens, window, chunked) - tokens / 2) / tokens
    assert keys_seen(model, tokens) == pytest.approx(exact, abs=2)
    assert keys_seen(model, 32) == 32  # shorter than the window
    assert keys_seen(base, tokens) == tokens
    some = model.model_copy(update={"full_every": 3})
    assert keys_seen(some, tokens) == pytest.approx((tokens + 2 * keys_seen(model, tokens)) / 3)


def test_the_mean_of_blocks_with_and_without_experts() -> None:
    routed = ModelSpec.parse({**LLAMA, "experts": 8, "top_k": 2, "expert_hidden": 32}, "test")
    dense = ModelSpec.parse(LLAMA, "test")
    mixed = routed.model_copy(update={"dense_layers": 1})
    for of in (
        block_matmul_flops_per_token,
        lambda m: kept_bytes_per_token(m, 64, "none", "flash").block,
        lambda m: kept_bytes_per_token(m, 64, "op", "flash", Ways(tensor=2, sequence_parallel=True)).block,
    ):
        assert of(mixed) == pytest.approx((of(dense) + 2 * of(routed)) / 3)
    assert 3 * mixed.parameters == dense.parameters + 2 * routed.parameters


def test_activations_of_a_latent() -> None:
    model = ModelSpec.parse({**LLAMA, "latent": LATENT}, "test")
    # 2 bytes of: norms' and products' inputs 4 x 64; latents before and after norms 2 x (16 + 24) + 8;
    # queries, keys, values and outputs 4 x 20 each; MLP 4 x 96; log-sum-exp 4 bytes a head
    by_hand = 2 * (4 * 64 + 2 * 40 + 8 + 4 * 4 * 20 + 4 * 96) + 4 * 4
    assert kept_bytes_per_token(model, 128, "none", "flash").block == by_hand


@pytest.mark.parametrize("name", PUBLISHED)
def test_each_is_predicted(name: str) -> None:
    machine, stack = setting(CONFIG, "dgx-h100", "megatron-lm")
    model, experts = CONFIG.model(name), CONFIG.model(name).experts or 1
    axes = Ways(tensor=2, expert=min(experts, 8))
    found = predict(job_of(machine, stack, model, CONFIG.scheme("zero3"), 64, 1, 8192, axes=axes))
    peak = 1e12 * machine.device.peak_tflops["bf16"]
    assert 0 < float(found.tflops_per_gpu) * 1e12 < peak
    assert sum(map(float, found.time_s.values())) == pytest.approx(float(found.step_time_s))


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"full_every": 2}, "full_every and chunked are for layers with a window"),
        ({"window": 8, "full_every": 9}, "full_every .9. is not from 2"),
        ({"latent": LATENT, "kv_heads": 2}, "latent attention has no kv_heads"),
        ({"latent": {**LATENT, "rope": 7}}, "even head size, not 7"),
        ({"dense_layers": 1}, "dense_layers .1. are some of layers with experts"),
        ({"attention": "linear", "window": 8}, "linear attention has no head_dim, latent or window"),
    ],
)
def test_what_is_refused(keys: dict[str, object], words: str) -> None:
    with pytest.raises(UserError, match=words):
        ModelSpec.parse({**LLAMA, **keys}, "test")
