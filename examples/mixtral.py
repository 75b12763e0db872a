"""A Mixtral of Hugging Face's whose experts lie on several ranks, from its own weights; the rest is sharded.

torchrun --nproc-per-node 4 examples/mixtral.py --expert 2 --scheme zero3
"""

import argparse
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from transformers import MixtralConfig, MixtralForCausalLM
from transformers.models.mixtral.modeling_mixtral import MixtralDecoderLayer, MixtralSparseMoeBlock

import lowband

SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2, "num_key_value_heads": 2}
LENGTH, BATCH = 32, 4  # of a step, over all ranks


def layer_of(block: MixtralSparseMoeBlock, balance: str = "bias") -> lowband.MixtureOfExperts:
    """A layer with the weights of a sparse block, which has those of all experts in two matrices."""
    matrices = block.experts
    up_gate_down = *matrices.gate_up_proj.chunk(2, dim=1)[::-1], matrices.down_proj
    experts, width, hidden = up_gate_down[0].shape
    routing = lowband.Routing(experts, block.top_k, normalized=True, balance=balance)
    with torch.device(matrices.down_proj.device):
        layer = lowband.MixtureOfExperts(hidden, width, routing, gated=True, activation=matrices.act_fn)
    layer.to(matrices.down_proj.dtype)
    ours = layer.experts.up, layer.experts.gate, layer.experts.down, layer.router.weight
    with torch.no_grad():
        for mine, theirs in zip(ours, (*up_gate_down, block.gate.weight), strict=True):
            mine.copy_(theirs)
    return layer


def adapted(model: nn.Module, balance: str = "bias") -> nn.Module:
    """The model, with a layer of lowband's in place of every sparse block."""
    for layer in model.modules():
        if isinstance(layer, MixtralDecoderLayer):
            layer.mlp = layer_of(layer.mlp, balance)
    return model


@lowband.one_line_errors()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--expert", type=int, default=2, help="ranks that have different experts")
    parser.add_argument("--route", default="merged", help="flat, hops or merged")
    parser.add_argument("--scheme", default="zero3", help="of the ranks that have the same parameters")
    parser.add_argument("--steps", type=int, default=20)
    options = parser.parse_args()
    dist.init_process_group("gloo")
    torch.manual_seed(0)  # the same values on every rank
    model = adapted(MixtralForCausalLM(MixtralConfig(vocab_size=256, **SIZES, **EXPERTS)))
    topology = lowband.Topology({}, lowband.Axes(expert=options.expert, route=options.route))
    lowband.spread_experts(model, topology)  # some experts of each layer
    lowband.shard(model, options.scheme, topology, MixtralDecoderLayer, torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    text = torch.tensor(list(Path(argparse.__file__).read_bytes()))
    data = topology.along("data")
    for step in range(1, options.steps + 1):
        starts = torch.randint(len(text) - LENGTH, (BATCH,), generator=torch.Generator().manual_seed(step))
        tokens = torch.stack([text[i : i + LENGTH] for i in starts.tolist()])
        mine = tokens.chunk(len(data.ranks))[data.place]
        loss = model(input_ids=mine, labels=mine).loss
        loss.backward()
        lowband.clip_grad_norm_(model, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        loads = lowband.balance_experts(model)  # of all ranks, by router
        dist.all_reduce(total := loss.detach().clone())
        if data.is_first and step % 5 == 0:
            most = max(float(load.max() / load.double().mean()) for load in loads.values())
            print(
                f"step {step}: loss {total / len(data.ranks):.4f}, most loaded expert {most:.2f}", flush=True
            )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
