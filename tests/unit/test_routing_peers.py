"""Routers of Hugging Face's models, built from tiny configurations: the same experts, the same weights.

Theirs compute scores in fp32 whatever the model's dtype; where weights are not equal to the bit, the sum of
a token's scores has another order.
"""

from typing import Any

import pytest
import torch

from lowband.engine.parallel.routing import Routed, Router
from lowband.spec.routing import Routing

pytest.importorskip("transformers")

from transformers import (
    DeepseekV2Config,
    DeepseekV3Config,
    GptOssConfig,
    MixtralConfig,
    OlmoeConfig,
    Qwen2MoeConfig,
    Qwen3MoeConfig,
    SwitchTransformersConfig,
)
from transformers.models.deepseek_v2.modeling_deepseek_v2 import DeepseekV2TopkRouter
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssTopKRouter
from transformers.models.mixtral.modeling_mixtral import (
    MixtralTopKRouter,
    load_balancing_loss_func,
)
from transformers.models.olmoe.modeling_olmoe import OlmoeTopKRouter
from transformers.models.qwen2_moe.modeling_qwen2_moe import Qwen2MoeTopKRouter
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter
from transformers.models.switch_transformers.modeling_switch_transformers import (
    SwitchTransformersTop1Router,
)

HIDDEN, EXPERTS, TOKENS = 16, 8, 200
SIZES = {"hidden_size": HIDDEN, "num_experts": EXPERTS}
LOCAL = {"hidden_size": HIDDEN, "num_local_experts": EXPERTS}
DEEPSEEK = {
    "n_routed_experts": EXPERTS, "hidden_size": HIDDEN, "num_experts_per_tok": 3, "num_attention_heads": 4,
    "num_key_value_heads": 4,
}  # fmt: skip
GROUPS = {"n_group": 4, "topk_group": 2, "routed_scaling_factor": 2.5}

# Their router, its configuration, ours beside the number of experts, and the factor between sums of weights.
PEERS: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "Mixtral": (
        MixtralTopKRouter,
        MixtralConfig(**LOCAL, num_experts_per_tok=2),
        {"top_k": 2, "normalized": True},
    ),
    "Qwen2-MoE": (
        Qwen2MoeTopKRouter,
        Qwen2MoeConfig(**SIZES, num_experts_per_tok=4, norm_topk_prob=False),
        {"top_k": 4},
    ),
    "Qwen3-MoE": (
        Qwen3MoeTopKRouter,
        Qwen3MoeConfig(**SIZES, num_experts_per_tok=4, norm_topk_prob=True),
        {"top_k": 4, "normalized": True},
    ),
    "OLMoE": (
        OlmoeTopKRouter,
        OlmoeConfig(**SIZES, num_experts_per_tok=4, norm_topk_prob=False),
        {"top_k": 4},
    ),
    "GPT-OSS": (
        GptOssTopKRouter,
        GptOssConfig(**LOCAL, num_experts_per_tok=4),
        {"top_k": 4, "normalized": True},
    ),
    "DeepSeek-V2-Lite": (
        DeepseekV2TopkRouter,
        DeepseekV2Config(**DEEPSEEK, topk_method="greedy", routed_scaling_factor=1.0),
        {"top_k": 3},
    ),
    "DeepSeek-V2": (
        DeepseekV2TopkRouter,
        DeepseekV2Config(**DEEPSEEK, **GROUPS, topk_method="group_limited_greedy"),
        {"top_k": 3, "groups": 4, "top_groups": 2, "scale": 2.5},
    ),
    "DeepSeek-V3": (
        DeepseekV3TopkRouter,
        DeepseekV3Config(**DEEPSEEK, **GROUPS, norm_topk_prob=True),
        {
            "top_k": 3, "scores": "sigmoid", "normalized": True, "scale": 2.5, "groups": 4, "top_groups": 2,
            "group_score": "best two",
        },
    ),
}  # fmt: skip
SAME_BITS = {"Mixtral", "Qwen2-MoE", "Qwen3-MoE", "OLMoE", "DeepSeek-V2-Lite", "DeepSeek-V2"}


def dense(routed: Routed) -> torch.Tensor:
    """[T, E]: the weights, 0 where there is no pair."""
    return torch.zeros(TOKENS, EXPERTS).index_put((routed.tokens_P, routed.experts_P), routed.weights_P)


@pytest.mark.parametrize("name", PEERS)
def test_same_experts_and_weights(name: str) -> None:
    make, config, ours = PEERS[name]
    theirs = make(config)
    torch.manual_seed(1)
    torch.nn.init.normal_(theirs.weight, std=0.3)
    mine = Router(HIDDEN, Routing(EXPERTS, **ours))
    mine.load_state_dict({"weight": theirs.weight.detach()}, strict=False)
    x = torch.randn(TOKENS, HIDDEN)
    _, weights, experts = theirs(x)
    expected = torch.zeros(TOKENS, EXPERTS).scatter(1, experts, weights.float())
    found = mine(x)
    tolerance = 0 if name in SAME_BITS else 3e-7
    torch.testing.assert_close(dense(found), expected, rtol=tolerance, atol=0)
    of = torch.randn(TOKENS, EXPERTS)
    for out, weight in ((expected, theirs.weight), (dense(found), mine.weight)):
        (out * of).sum().backward()
        assert weight.grad is not None
    torch.testing.assert_close(mine.weight.grad, theirs.weight.grad, rtol=1e-4, atol=1e-5)


def test_switch_with_capacity() -> None:
    config = SwitchTransformersConfig(d_model=HIDDEN, num_experts=EXPERTS, expert_capacity=26)
    theirs = SwitchTransformersTop1Router(config).eval()
    torch.manual_seed(1)
    mine = Router(HIDDEN, Routing(EXPERTS, 1, capacity=1.04))
    mine.load_state_dict({"weight": theirs.classifier.weight.detach()}, strict=False)
    x = torch.randn(TOKENS, HIDDEN)
    sent, weights, _ = theirs(x.unsqueeze(0))
    found = mine(x)
    assert mine.routing.most_pairs(TOKENS) == config.expert_capacity
    assert len(found.experts_P) < TOKENS
    torch.testing.assert_close(dense(found), (sent * weights)[0].float(), rtol=0, atol=0)


def test_deepseeks_bias() -> None:
    """Its e_score_correction_bias: in the choice of groups and experts, not in weights."""
    make, config, ours = PEERS["DeepSeek-V3"]
    theirs = make(config)
    torch.manual_seed(1)
    torch.nn.init.normal_(theirs.weight, std=0.3)
    torch.nn.init.normal_(theirs.e_score_correction_bias, std=0.2)
    mine = Router(HIDDEN, Routing(EXPERTS, **ours, balance="bias"))
    mine.load_state_dict({"weight": theirs.weight.detach(), "bias": theirs.e_score_correction_bias})
    x = torch.randn(TOKENS, HIDDEN)
    _, weights, experts = theirs(x)
    expected = torch.zeros(TOKENS, EXPERTS).scatter(1, experts, weights)
    torch.testing.assert_close(dense(mine(x)), expected, rtol=3e-7, atol=0)
    mine.bias.zero_()
    assert (dense(mine(x)) - expected).abs().max() > 0.1


def test_the_auxiliary_losss_gradient() -> None:
    """Theirs is larger by top_k, because its shares of pairs sum to that."""
    mine = Router(HIDDEN, Routing(EXPERTS, 3, balance="loss", loss_weight=0.5))
    x = torch.randn(TOKENS, HIDDEN)
    weight = mine.weight.detach().clone().requires_grad_()
    (0.5 / 3 * load_balancing_loss_func((x @ weight.T,), EXPERTS, 3)).backward()
    (mine(x).weights_P * 0).sum().backward()
    torch.testing.assert_close(mine.weight.grad, weight.grad, rtol=1e-4, atol=1e-7)
