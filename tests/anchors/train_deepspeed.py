"""Train with DeepSpeed's ZeRO-3 and its checkpoints, as its tutorials do (deepspeed.ai/getting-started)."""

import os

os.environ["DS_ACCELERATOR"] = "cpu"

import deepspeed
import torch

from lowband.model.gpt import GPT, Block
from lowband.trainers.deepspeed import configuration
from tests.anchors.peer import Arguments, Batches, Records


def main() -> None:
    arguments = Arguments.parse()
    spec, checkpoints = arguments.spec, str(arguments.folder / "checkpoints")
    torch.set_num_threads(1)
    # It would be compiled at the first start, and no stage of ZeRO uses it.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed("gloo", timeout=arguments.timeout)
    rank = torch.distributed.get_rank()
    model = GPT(spec.model, spec.seed)
    deepspeed.utils.set_z3_leaf_modules(model, [Block])
    engine, _, _, _ = deepspeed.initialize(
        model=model,
        optimizer=torch.optim.AdamW(
            model.parameters(), lr=spec.learning_rate, weight_decay=spec.weight_decay
        ),
        config=configuration(spec, {"stage": 3}),
    )
    batches, records, done = Batches(spec, rank), Records(arguments.folder, rank), 0
    path, state = engine.load_checkpoint(checkpoints)
    if path is not None:
        done = state["step"]
    records.start(done)
    for step in range(done + 1, spec.steps + 1):
        loss = engine(*batches.of_step(step))
        engine.backward(loss)
        engine.step()
        records.step(step, loss)
        if step % spec.checkpoint_every == 0:
            engine.save_checkpoint(checkpoints, client_state={"step": step})
    whole = {
        name: deepspeed.utils.safe_get_full_fp32_param(value)
        for name, value in engine.module.named_parameters()
    }
    records.final(whole)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
