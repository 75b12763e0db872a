"""A plain training loop, resumed where it stopped.

torchrun --nproc-per-node 4 examples/train.py --scheme hier3 --levels package=2,node=4 --steps 20
"""

import argparse
import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

import lowband

WIDTH, LENGTH, BATCH = 64, 64, 4


class Block(nn.TransformerEncoderLayer):
    def __init__(self) -> None:
        super().__init__(WIDTH, 4, 4 * WIDTH, dropout=0.0, batch_first=True, norm_first=True)


class ByteModel(nn.Module):
    """Bytes in, the next byte out."""

    def __init__(self, blocks: int = 3) -> None:
        super().__init__()
        self.embed = nn.Embedding(256, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))
        self.head = nn.Linear(WIDTH, 256)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(LENGTH))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """tokens: (batch, LENGTH + 1), int64. The mean loss in nats per token."""
        x = self.embed(tokens[:, :-1])
        for block in self.blocks:
            x = block(x, src_mask=self.mask.to(x.dtype))
        return nn.functional.cross_entropy(self.head(x).float().flatten(0, 1), tokens[:, 1:].flatten())


def batch(text: torch.Tensor, step: int) -> torch.Tensor:
    """Of a step and this rank: a resumed run goes on with the same ones."""
    random = torch.Generator().manual_seed(step * dist.get_world_size() + dist.get_rank())
    starts = torch.randint(len(text) - LENGTH, (BATCH,), generator=random)
    return torch.stack([text[start : start + LENGTH + 1] for start in starts])


def levels(text: str) -> dict[str, int]:
    return {name: int(ranks) for name, ranks in (part.split("=") for part in text.split(","))}


@lowband.one_line_errors()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--scheme", default="zero3", help="a name of config/schemes.yaml")
    parser.add_argument("--levels", default={}, type=levels, help="name=ranks,... from inner to outer")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--checkpoints", help="folder; default: none are written")
    options = parser.parse_args()
    device = torch.device("cpu")
    if torch.cuda.is_available():
        torch.cuda.set_device(device := torch.device("cuda", int(os.environ["LOCAL_RANK"])))
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    torch.manual_seed(0)  # the same values on every rank
    topology = lowband.Topology(options.levels)
    model = lowband.shard(ByteModel().to(device), options.scheme, topology, wrap=Block)
    matrices = [p for p in model.parameters() if p.ndim > 1]
    others = [p for p in model.parameters() if p.ndim <= 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=3e-3)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.97)

    done, checkpointer = 0, None
    if options.checkpoints:
        checkpointer = lowband.Checkpointer(options.checkpoints)
        if extra := checkpointer.load_newest(model, optimizer):
            done = extra["step"]
            schedule.load_state_dict(extra["schedule"])
    text = torch.tensor(list(Path(argparse.__file__).read_bytes()))
    for step in range(done + 1, options.steps + 1):
        loss = model(batch(text, step).to(device))
        loss.backward()
        norm = lowband.clip_grad_norm_(model, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        dist.all_reduce(mean := loss.detach().clone())
        if dist.get_rank() == 0 and step % 5 == 0:
            print(f"step {step}: loss {mean / dist.get_world_size():.4f}, norm {norm:.3f}", flush=True)
        if checkpointer and step % 10 == 0:
            checkpointer.save(step, model, optimizer, {"step": step, "schedule": schedule.state_dict()})
    if checkpointer:
        checkpointer.wait()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
