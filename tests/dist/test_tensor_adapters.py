"""Adapters of PEFT in layers that are cut along tensor."""

import torch
from torch import nn

import lowband
from lowband.run.on_ranks import on_ranks
from lowband.spec.tensor import Column, Plan, Row
from tests.refused import refusal

PLAN: Plan = {
    "0.base_layer": Column(), "0.lora_B.*": Column(), "2.base_layer": Row(), "2.lora_A.*": Row(),
}  # fmt: skip


def _adapted() -> nn.Sequential:
    from peft import LoraConfig, inject_adapter_in_model

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(12, 16), nn.ReLU(), nn.Linear(16, 12)).double()
    inject_adapter_in_model(LoraConfig(r=4, target_modules=["0", "2"], init_lora_weights=False), model)
    return model.double()


def _losses(tensor: int) -> list[float]:
    topology = lowband.Topology({}, lowband.Axes(tensor=tensor))
    model = lowband.parallelize(_adapted(), PLAN, topology)
    lowband.shard(model, "zero3", topology, nn.Sequential, torch.float64, torch.float64)
    optimizer = torch.optim.AdamW((each for each in model.parameters() if each.requires_grad), lr=0.1)
    losses = []
    for step in range(3):
        inputs = torch.randn(8, 12, dtype=torch.float64, generator=torch.Generator().manual_seed(step))
        loss = (model(inputs) - inputs).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss))
    return losses


def _told() -> str:
    return refusal(
        lowband.parallelize, _adapted(), {"0": Column()}, lowband.Topology({}, lowband.Axes(tensor=1))
    )


def test_they_are_cut_as_their_layer() -> None:
    import peft  # noqa: F401 (once, before the ranks are forked)

    [plain] = on_ranks(1, _losses, 1)
    for losses in on_ranks(2, _losses, 2):
        assert max(abs(one - other) for one, other in zip(losses, plain, strict=True)) < 1e-12
    assert plain[-1] < plain[0]


def test_a_rule_for_the_adapted_layer_is_told_what_is_in_it() -> None:
    assert on_ranks(1, _told) == [
        "Column of '0': the module is of type peft.tuners.lora.layer.Linear (allowed: Linear; in it: "
        "'0.base_layer', '0.lora_A.default', '0.lora_B.default')"
    ]
