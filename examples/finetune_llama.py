"""Fine-tune a Hugging Face Llama that no rank could hold: read in pieces, train, write it back.

torchrun --nproc-per-node 4 examples/finetune_llama.py FOLDER NEW_FOLDER --text FILE --steps 10

FOLDER has config.json and safetensors files, as `save_pretrained` writes them; NEW_FOLDER is what
`AutoModelForCausalLM.from_pretrained` reads.
"""

import argparse
import shutil
from pathlib import Path

import torch
import torch.distributed as dist
from transformers import AutoConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding

import lowband

LENGTH = 64


def on_meta(folder: Path) -> LlamaForCausalLM:
    """The model without memory, but for the rotary embedding's frequencies, which no file has."""
    if not (folder / "config.json").is_file():
        raise lowband.UserError("no config.json", where=folder, allowed="what save_pretrained wrote")
    config = AutoConfig.from_pretrained(folder)
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    model.tie_weights()
    model.model.rotary_emb = LlamaRotaryEmbedding(config)
    return model


def tokens_of(path: Path, model: LlamaForCausalLM) -> torch.Tensor:
    """The bytes of a file as tokens, 1D."""
    tokens = torch.tensor(list(path.read_bytes())) % model.config.vocab_size
    if len(tokens) <= LENGTH:
        raise lowband.UserError(f"{len(tokens)} bytes", where=path, allowed=f"more than {LENGTH}")
    return tokens


@lowband.one_line_errors()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("new_folder", type=Path)
    parser.add_argument("--text", type=Path, required=True, help="its bytes are the tokens of this example")
    parser.add_argument("--scheme", default="zero3")
    parser.add_argument("--steps", type=int, default=10)
    options = parser.parse_args()
    if options.new_folder.exists():
        raise lowband.UserError("exists already", where=options.new_folder, allowed="a new folder")

    dist.init_process_group("gloo")
    model = lowband.shard(
        on_meta(options.folder),
        options.scheme,
        lowband.Topology({}),
        wrap=LlamaDecoderLayer,
        init=lowband.Safetensors(options.folder),
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    text = tokens_of(options.text, model)
    for step in range(1, options.steps + 1):
        start = (step * dist.get_world_size() + dist.get_rank()) * LENGTH % (len(text) - LENGTH)
        tokens = text[start : start + LENGTH].unsqueeze(0)
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        lowband.clip_grad_norm_(model, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        dist.all_reduce(mean := loss.detach().clone())
        if dist.get_rank() == 0:
            print(f"step {step}: loss {mean / dist.get_world_size():.4f}", flush=True)

    lowband.save_safetensors(model, options.new_folder)
    if dist.get_rank() == 0:
        shutil.copy(options.folder / "config.json", options.new_folder)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
