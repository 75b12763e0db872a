"""Shapes with experts in config/models.yaml against published numbers of parameters."""

import pytest

from lowband.cost.flops import expert_elements, model_flops_per_token
from tests.checkout import CONFIG


def test_mixtral() -> None:
    """93,405,585,408 bytes (total_size, model.safetensors.index.json), two a parameter; 12.9 * 10^9 of them
    meet a token (as its authors say)."""
    model = CONFIG.model("mixtral-8x7b")
    assert model.parameters == 93_405_585_408 // 2
    assert model.parameters - model.layers * model.idle_elements == pytest.approx(12.9e9, rel=2e-3)


def test_qwen() -> None:
    """28,631,568,384 bytes, of which the gates of the shared expert are left out; 2.7 * 10^9 meet a token
    (its model card)."""
    model = CONFIG.model("qwen1.5-moe-a2.7b")
    assert model.parameters + 24 * 2048 == 28_631_568_384 // 2
    assert model.parameters - model.layers * model.idle_elements == pytest.approx(2.7e9, rel=5e-3)


def test_deepseek() -> None:
    """31,412,968,448 bytes, with MLA in place of our attention: queries of 128 + 64,
    keys and values from 512 and a norm, and with a plain MLP of 10,944 in the first layer (config.json)."""
    model, h, heads = CONFIG.model("deepseek-v2-lite-mha"), 2048, 16
    ours = 4 * h * h
    latent = h * heads * (128 + 64) + h * (512 + 64) + 512 + 512 * heads * (128 + 128) + heads * 128 * h
    of_first = (64 + 2) * expert_elements(model) + 64 * h
    published = model.parameters + 27 * (latent - ours) - of_first + 3 * h * 10_944
    assert published == 31_412_968_448 // 2


def test_flops_are_of_what_meets_a_token() -> None:
    model = CONFIG.model("mixtral-8x7b")
    active = model.parameters - model.layers * 6 * 3 * 4096 * 14336
    assert model_flops_per_token(model, 4096) == 6 * (active - 32000 * 4096) + 12 * 32 * 4096 * 4096
