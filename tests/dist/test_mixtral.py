"""examples/mixtral.py: its layers are transformers' own, on any number of ranks, and they learn."""

import runpy

import pytest
import torch
import torch.distributed as dist
from test_examples import EXAMPLES, run
from transformers import MixtralConfig, MixtralForCausalLM

import lowband
from lowband.run.on_ranks import on_ranks


def test_a_mixtral_on_four_ranks_learns_as_on_one_rank() -> None:
    alone = run(1, "mixtral.py", "--expert", 1, "--steps", 10)
    assert alone[-1] < alone[0]
    assert run(4, "mixtral.py", "--steps", 10) == pytest.approx(alone, abs=2e-4)


def test_a_mixtral_with_our_layers_has_its_logits_and_gradients() -> None:
    [expected] = on_ranks(1, mixtral_alone)
    for ranks in (1, 2, 4):
        for mine, gradients in on_ranks(ranks, mixtral_spread, min(ranks, 2)):
            torch.testing.assert_close(mine, expected[0], rtol=1e-12, atol=1e-12)
            for name, gradient in gradients.items():
                torch.testing.assert_close(gradient, expected[1][name], rtol=1e-10, atol=1e-12)


def mixtral() -> tuple[torch.nn.Module, torch.Tensor]:
    """In fp64, also where transformers computes in fp32 whatever a model's dtype is; and 4 sequences."""
    torch.manual_seed(0)
    torch.Tensor.float = torch.Tensor.double  # type: ignore[method-assign]
    example = runpy.run_path(str(EXAMPLES / "mixtral.py"))
    sizes = example["SIZES"] | example["EXPERTS"]
    config = MixtralConfig(vocab_size=64, **sizes, experts_implementation="eager")  # its grouped has no fp64
    model = MixtralForCausalLM(config).double()
    for name, module in [*model.named_modules()]:
        if type(module).__name__ == "MixtralRMSNorm":
            norm = torch.nn.RMSNorm(len(module.weight), module.variance_epsilon, dtype=torch.float64)
            model.set_submodule(name, norm)
    return model, torch.arange(4 * 12).view(4, 12) * 7 % 64


def mixtral_alone() -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The logits of transformers' modules, and gradients of their weights under our names."""
    model, tokens = mixtral()
    logits = model(input_ids=tokens).logits
    (logits.square().sum() / logits.numel()).backward()
    return logits.detach(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def mixtral_spread(expert: int) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """All logits; gradients of all ranks under transformers' names, as `lowband.shard` reduces them."""
    model, tokens = mixtral()
    model = runpy.run_path(str(EXAMPLES / "mixtral.py"))["adapted"](model, "none")
    topology = lowband.Topology({}, lowband.Axes(expert=expert))
    lowband.spread_experts(model, topology)
    data, along = topology.along("data"), topology.along("expert")
    mine = tokens.chunk(len(data.ranks))[data.place]
    logits = model(input_ids=mine).logits
    (logits.square().sum() / (logits.numel() * len(data.ranks))).backward()
    whole = [torch.empty_like(logits) for _ in data.ranks]
    dist.all_gather(whole, logits.detach().contiguous())
    found: dict[str, torch.Tensor] = {}
    for name, parameter in model.named_parameters():
        gradient = parameter.grad
        if name.split(".")[-1] in ("up", "gate", "down"):
            total = gradient.new_zeros(len(along.ranks), *gradient.shape)
            total[along.place] = gradient
            gradient = total.flatten(0, 1)
        dist.all_reduce(gradient)
        found[name] = gradient
    return torch.cat(whole), in_transformers(found)


def in_transformers(found: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    for name in [name for name in found if name.endswith("experts.up")]:
        layer = name.removesuffix("experts.up")
        gate_up = torch.cat([found.pop(f"{layer}experts.gate"), found.pop(name)], dim=1)
        found[f"{layer}experts.gate_up_proj"] = gate_up
        found[f"{layer}experts.down_proj"] = found.pop(f"{layer}experts.down")
        found[f"{layer}gate.weight"] = found.pop(f"{layer}router.weight")
    return found
