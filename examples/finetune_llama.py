"""Fine-tune a Hugging Face Llama that no rank could hold: read in pieces, train, write it back.

torchrun --nproc-per-node 4 examples/finetune_llama.py FOLDER NEW_FOLDER --text FILE --steps 10

With --tensor 2, pairs of ranks hold halves of every layer's matrices, and see the same text. FOLDER has
config.json and safetensors files, as `save_pretrained` writes them; NEW_FOLDER is what
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


def plan(model: LlamaForCausalLM) -> dict[str, object]:
    """How a layer is cut: whole heads to each rank; embedding, norms and head stay whole."""
    heads = lowband.Column(together=model.config.head_dim)
    return {
        "*.q_proj": heads, "*.k_proj": heads, "*.v_proj": heads, "*.o_proj": lowband.Row(),
        "*.gate_proj": lowband.Column(), "*.up_proj": lowband.Column(), "*.down_proj": lowband.Row(),
    }  # fmt: skip


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
    parser.add_argument("--tensor", type=int, default=1, help="ranks that share a layer's matrices")
    parser.add_argument("--steps", type=int, default=10)
    options = parser.parse_args()
    if options.new_folder.exists():
        raise lowband.UserError("exists already", where=options.new_folder, allowed="a new folder")

    dist.init_process_group("gloo")
    topology = lowband.Topology({}, lowband.Axes(tensor=options.tensor))
    data = topology.along("data")
    model = on_meta(options.folder)
    lowband.parallelize(model, plan(model), topology)
    init = lowband.Safetensors(options.folder)
    lowband.shard(model, options.scheme, topology, wrap=LlamaDecoderLayer, init=init)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    text = tokens_of(options.text, model)
    for step in range(1, options.steps + 1):
        start = (step * len(data.ranks) + data.place) * LENGTH % (len(text) - LENGTH)
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
