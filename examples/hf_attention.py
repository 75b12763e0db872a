"""Lowband's attention in Hugging Face models: `attn_implementation="lowband"`.

python examples/hf_attention.py                  # a tiny Gemma 2, beside eager attention
python examples/hf_attention.py FOLDER --bf16    # a model of yours, from what save_pretrained wrote

It needs a GPU, or TRITON_INTERPRET=1 for the tiny model on a CPU.
"""

import argparse

import torch
from transformers import AutoModelForCausalLM, Gemma2Config, PreTrainedModel

import lowband
from lowband.kernels.huggingface import register

LENGTH = 40


def tiny() -> PreTrainedModel:
    config = Gemma2Config(
        vocab_size=256, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=24, query_pre_attn_scalar=24, sliding_window=12,
        attn_logit_softcapping=5.0, layer_types=["sliding_attention", "full_attention"],
        max_position_embeddings=256,
    )  # fmt: skip
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config)


def batches(vocab: int) -> dict[str, dict[str, torch.Tensor]]:
    """Two sequences each: whole ones, several documents in a row, padding behind and before."""
    tokens = torch.randint(vocab, (2, LENGTH), generator=torch.Generator().manual_seed(1))
    real = torch.arange(LENGTH).expand(2, -1)
    padded = torch.stack([real[0] < 31, real[1] >= 20])
    return {
        "whole": {"input_ids": tokens, "labels": tokens},
        "documents": {
            "input_ids": tokens, "labels": tokens, "position_ids": torch.stack([real[0], real[1] % 19]),
        },
        "padding": {
            "input_ids": tokens, "labels": tokens.masked_fill(~padded | ~padded.roll(1, 1), -100),
            "attention_mask": padded.long(),
            "position_ids": (padded.long().cumsum(1) - 1).clamp(min=0),
        },
    }  # fmt: skip


def step(
    model: PreTrainedModel, attend: str, batch: dict[str, torch.Tensor]
) -> tuple[float, list[torch.Tensor]]:
    """The loss, and a copy of all gradients."""
    model.set_attn_implementation(attend)
    model.zero_grad(set_to_none=True)
    loss = model(**batch, use_cache=False).loss
    loss.backward()
    return float(loss.detach()), [x.grad.clone() for x in model.parameters() if x.grad is not None]


@lowband.one_line_errors()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", nargs="?", help="default: a tiny Gemma 2 with random weights")
    parser.add_argument("--bf16", action="store_true", help="on a GPU")
    options = parser.parse_args()
    register()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = AutoModelForCausalLM.from_pretrained(options.folder) if options.folder else tiny()
    model = model.to(device, torch.bfloat16 if options.bf16 else torch.float32).train()
    for name, batch in batches(model.config.vocab_size).items():
        given = {key: value.to(device) for key, value in batch.items()}
        loss, wanted = step(model, "eager", given)
        ours, found = step(model, "lowband", given)
        off = max(float((a - b).abs().max()) for a, b in zip(found, wanted, strict=True))
        most = max(float(x.abs().max()) for x in wanted)
        print(
            f"{name}: loss {loss:.6f}, with lowband's attention {ours:.6f}; "
            f"gradients differ by {off / most:.1e}"
        )


if __name__ == "__main__":
    main()
