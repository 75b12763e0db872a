"""LoRA (arXiv 2106.09685) by PEFT: frozen blocks with small trainable adapters; only the adapters are saved.

torchrun --nproc-per-node 2 examples/lora.py FOLDER ADAPTERS --text FILE --steps 10

PEFT adds the adapters before `lowband.shard`. Frozen weights are sharded and gathered as the others are; they
have no gradients and no optimizer states. `PeftModel.from_pretrained(model, "ADAPTERS")` reads what it saves.
"""

import argparse
from pathlib import Path

import torch
import torch.distributed as dist
from finetune_llama import LENGTH, on_meta, tokens_of
from peft import LoraConfig, PeftModel, get_peft_model
from peft.tuners.lora import LoraLayer
from transformers import LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

import lowband


def adapted(model: LlamaForCausalLM, rank: int) -> PeftModel:
    """The model with adapters, which PEFT puts on the meta device as their layers are, made real."""
    made = get_peft_model(model, LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=["q_proj", "v_proj"]))
    for layer in made.modules():
        if isinstance(layer, LoraLayer):
            layer.lora_A.to_empty(device="cpu")
            layer.lora_B.to_empty(device="cpu")
            layer.reset_lora_parameters("default", True)
    return made


def without_peft(name: str) -> str:
    """The name of a frozen parameter before PEFT wrapped its module."""
    return name.removeprefix("base_model.model.").replace(".base_layer.", ".")


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
    if options.adapters.exists():
        raise lowband.UserError("exists already", where=options.adapters, allowed="a new folder")

    dist.init_process_group("gloo")
    torch.manual_seed(0)  # the same adapters on every rank
    model = adapted(on_meta(options.folder), options.rank)
    base = lowband.Safetensors(options.folder, name_of=without_peft)
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
        model.save_pretrained(options.adapters, state_dict=state, save_embedding_layers=False)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
