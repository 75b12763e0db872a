"""A training loop with FSDP2. `from_fully_shard.py` is the same loop with lowband; compare them with diff."""

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from train import ByteModel, batch

TEXT = torch.arange(10_000) * 7 % 256

dist.init_process_group("gloo")
torch.manual_seed(0)
model = ByteModel()
for block in model.blocks:
    fully_shard(block)
fully_shard(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
for step in range(5):
    loss = model(batch(TEXT, step))
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    dist.all_reduce(loss := loss.detach())
    if dist.get_rank() == 0:
        print(f"step {step}: loss {loss / dist.get_world_size():.5f}", flush=True)
dist.destroy_process_group()
