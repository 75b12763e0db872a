"""LoRA (arXiv 2106.09685): frozen blocks with small trainable adapters; only the adapters are saved.

torchrun --nproc-per-node 2 examples/lora.py FOLDER adapters.safetensors --text FILE --steps 10

Frozen weights are sharded and gathered as the others are; they have no gradients and no optimizer states.
"""

import argparse
from pathlib import Path

import torch
import torch.distributed as dist
from finetune_llama import LENGTH, on_meta, tokens_of
from safetensors.torch import save_file
from torch import nn
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

import lowband


class LoRA(nn.Module):
    """A frozen linear map plus a trainable one of low rank, which starts at zero."""

    def __init__(self, base: nn.Linear, rank: int, scale: float) -> None:
        super().__init__()
        self.base, self.scale = base, scale
        self.down = nn.Parameter(torch.randn(rank, base.in_features) / base.in_features**0.5)
        self.up = nn.Parameter(torch.zeros(base.out_features, rank))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.scale * (x @ self.down.T) @ self.up.T


def add_adapters(model: nn.Module, rank: int) -> None:
    model.requires_grad_(False)
    for layer in model.modules():
        if isinstance(layer, LlamaDecoderLayer):
            attention = layer.self_attn
            attention.q_proj = LoRA(attention.q_proj, rank, 2.0)
            attention.v_proj = LoRA(attention.v_proj, rank, 2.0)


@lowband.one_line_errors()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("adapters", type=Path)
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--scheme", default="zero3")
    parser.add_argument("--rank", type=int, default=4)
    parser.add_argument("--steps", type=int, default=10)
    options = parser.parse_args()
    if not options.adapters.parent.is_dir():
        raise lowband.UserError("no such folder", where=options.adapters.parent)

    dist.init_process_group("gloo")
    torch.manual_seed(0)  # the same adapters on every rank
    model = on_meta(options.folder)
    add_adapters(model, options.rank)
    base = lowband.Safetensors(options.folder, name_of=lambda name: name.replace(".base.", "."))
    lowband.shard(model, options.scheme, lowband.Topology({}), wrap=LlamaDecoderLayer, init=base)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    text = tokens_of(options.text, model)
    for step in range(1, options.steps + 1):
        start = (step * dist.get_world_size() + dist.get_rank()) * LENGTH % (len(text) - LENGTH)
        tokens = text[start : start + LENGTH].unsqueeze(0)
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        dist.all_reduce(mean := loss.detach().clone())
        if dist.get_rank() == 0:
            print(f"step {step}: loss {mean / dist.get_world_size():.4f}", flush=True)

    state = lowband.full_state_dict(model)  # of rank 0; all of it, which a host's memory must hold
    if dist.get_rank() == 0:
        save_file({name: state[name] for name in state if name.endswith((".down", ".up"))}, options.adapters)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
