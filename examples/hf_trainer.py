"""Hugging Face's Trainer on a sharded Llama.

torchrun --nproc-per-node 2 examples/hf_trainer.py FOLDER NEW_FOLDER --text FILE --steps 10

FOLDER is as in finetune_llama.py; `from_pretrained` reads NEW_FOLDER and its checkpoints. The same command
again goes on from the newest checkpoint. To be saved, weights are collected on rank 0: a host must hold them.
"""

import argparse
from pathlib import Path

import torch
from accelerate import Accelerator
from finetune_llama import LENGTH, on_meta, tokens_of
from transformers import Trainer, TrainingArguments
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

import lowband

REFUSED = {
    "fp16": "compute_dtype of lowband.shard", "bf16": "compute_dtype of lowband.shard",
    "torch_compile": "module.compile() of each layer, before lowband.shard",
    "load_best_model_at_end": "NEW_FOLDER/checkpoint-STEP, read afterwards",
    "fsdp": "lowband.shard alone", "deepspeed": "lowband.shard alone",
}  # fmt: skip


def adopt(model: torch.nn.Module, accelerator: Accelerator) -> None:
    """Before `accelerator.prepare`, in any loop: no DDP around the model, lowband's no_sync and norm."""
    model._is_accelerate_prepared = True  # else DDP, which lowband refuses
    model.no_sync = lambda: lowband.no_sync(model)
    accelerator.clip_grad_norm_ = lambda _, most, norm_type=2: lowband.clip_grad_norm_(model, float(most))


class ShardedTrainer(Trainer):
    def __init__(self, model: torch.nn.Module, args: TrainingArguments, **others: object) -> None:
        for name, instead in REFUSED.items():
            if getattr(args, name):
                raise lowband.UserError(f"{name} with a sharded module", where=name, allowed=instead)
        super().__init__(model, args, **others)
        adopt(model, self.accelerator)

    def _move_model_to_device(self, model: torch.nn.Module, device: torch.device) -> None:
        """lowband.shard did."""

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        self._save(output_dir, lowband.full_state_dict(self.model))  # all ranks collect, rank 0 writes

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        checkpointer = lowband.Checkpointer(Path(output_dir, "shards"))
        extra = {"schedule": self.lr_scheduler.state_dict()}
        checkpointer.save(self.state.global_step, self.model, self.optimizer.optimizer, extra)
        checkpointer.wait()

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: object = None) -> None:
        """Weights are read with the optimizer's states, which belong to the same shards."""

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint:
            shards = lowband.Checkpointer(Path(checkpoint, "shards"))
            if (extra := shards.load_newest(self.model, self.optimizer.optimizer)) is None:
                raise lowband.UserError("no shards", where=checkpoint, allowed="what this trainer saved")
            self.lr_scheduler.load_state_dict(extra["schedule"])


def arguments(folder: Path, steps: int, **others: object) -> TrainingArguments:
    return TrainingArguments(folder, max_steps=steps, **{
        "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "max_grad_norm": 1.0,
        "learning_rate": 3e-3, "lr_scheduler_type": "constant", "use_cpu": not torch.cuda.is_available(),
        "logging_steps": 1, "save_steps": 4, "eval_strategy": "steps", "eval_steps": 4, "report_to": "none",
        "disable_tqdm": True,
    } | others)  # fmt: skip


@lowband.one_line_errors()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("new_folder", type=Path)
    parser.add_argument("--text", type=Path, required=True, help="its bytes are the tokens of this example")
    parser.add_argument("--scheme", default="zero3")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    options = parser.parse_args()
    args = arguments(options.new_folder, options.steps)  # makes the process group
    model, init = on_meta(options.folder), lowband.Safetensors(options.folder)
    topology, dtype = lowband.Topology({}), getattr(torch, options.dtype)
    lowband.shard(model, options.scheme, topology, wrap=LlamaDecoderLayer, compute_dtype=dtype, init=init)
    parts = tokens_of(options.text, model).split(LENGTH)[:-1]
    text = [{"input_ids": part, "labels": part} for part in parts]
    trainer = ShardedTrainer(model, args, train_dataset=text[4:], eval_dataset=text[:4])
    whole = [file.parent for file in options.new_folder.glob("checkpoint-*/trainer_state.json")]
    newest = max(whole, key=lambda folder: int(folder.name.rpartition("-")[2]), default=None)
    trainer.train(newest and str(newest))
    trainer.save_model()


if __name__ == "__main__":
    main()
