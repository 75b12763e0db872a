"""A Llama of Hugging Face's as a chain, in stages of a pipeline; each stage is sharded along the data axis.

torchrun --nproc-per-node 4 examples/pipeline.py --pipeline 2 --schedule zb-v --scheme zero3
"""

import argparse
import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

import lowband

LENGTH, BATCH, MICRO_BATCHES = 64, 2, 4
SIZES = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 6, "num_attention_heads": 4}


class Layer(nn.Module):
    """A module of the chain takes what the one before returns, so each layer finds the positions itself."""

    def __init__(self, layer: nn.Module, rotary: nn.Module) -> None:
        super().__init__()
        self.layer, self.rotary = layer, rotary

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        positions = torch.arange(x.shape[1], device=x.device).unsqueeze(0)
        return self.layer(x, position_embeddings=self.rotary(x, positions))


def chain(llama: LlamaForCausalLM) -> list[nn.Module]:
    """Tokens in, logits out."""
    inner = llama.model
    layers = [Layer(layer, inner.rotary_emb) for layer in inner.layers]
    return [inner.embed_tokens, *layers, nn.Sequential(inner.norm, llama.lm_head)]


def loss_of(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """A micro-batch's part of the mean loss, in nats per token."""
    return nn.functional.cross_entropy(logits.float().flatten(0, 1), targets.flatten()) / MICRO_BATCHES


def micro_batches(text: torch.Tensor, step: int, place: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Of a step and a place along the data axis: all stages there know the same ones."""
    random = torch.Generator().manual_seed(1000 * step + place)
    starts = torch.randint(len(text) - LENGTH, (MICRO_BATCHES, BATCH), generator=random)
    cut = torch.stack([torch.stack([text[i : i + LENGTH + 1] for i in row]) for row in starts.tolist()])
    return [(tokens[:, :-1], tokens[:, 1:]) for tokens in cut]


@lowband.one_line_errors()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pipeline", type=int, default=2, help="ranks along the pipeline axis")
    parser.add_argument("--schedule", default="zb-v", help="1f1b, interleaved, breadth, zb-h1, zb-v, ...")
    parser.add_argument("--scheme", default="zero3", help="of each stage, along the data axis")
    parser.add_argument("--steps", type=int, default=20)
    options = parser.parse_args()
    device = torch.device("cpu")
    if torch.cuda.is_available():
        torch.cuda.set_device(device := torch.device("cuda", int(os.environ["LOCAL_RANK"])))
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    torch.manual_seed(0)  # the same values on every rank
    topology = lowband.Topology({}, lowband.Axes(pipeline=options.pipeline))
    modules = chain(LlamaForCausalLM(LlamaConfig(vocab_size=256, **SIZES)).to(device))
    pipe = lowband.Pipeline(modules, loss_of, options.scheme, topology, MICRO_BATCHES, options.schedule)
    optimizer = torch.optim.AdamW(pipe.parameters(), lr=3e-3)
    text = torch.tensor(list(Path(argparse.__file__).read_bytes()), device=device)
    data = topology.along("data")
    for step in range(1, options.steps + 1):
        losses = pipe.step(micro_batches(text, step, data.place))
        norm = lowband.clip_grad_norm_(pipe, 1.0)  # over all stages
        optimizer.step()
        optimizer.zero_grad()
        if pipe.has_loss and data.is_first and step % 5 == 0:
            print(f"step {step}: loss {sum(losses):.4f}, norm {norm:.3f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
