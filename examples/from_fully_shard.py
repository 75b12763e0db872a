"""The loop of `fully_shard.py` with lowband; compare them with diff."""

import torch
import torch.distributed as dist
from train import Block, ByteModel, batch

import lowband

TEXT = torch.arange(10_000) * 7 % 256

dist.init_process_group("gloo")
torch.manual_seed(0)
model = ByteModel()
lowband.shard(model, "zero3", lowband.Topology({}), wrap=Block, compute_dtype=torch.float32)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
for step in range(5):
    loss = model(batch(TEXT, step))
    loss.backward()
    lowband.clip_grad_norm_(model, 1.0)
    optimizer.step()
    optimizer.zero_grad()
    dist.all_reduce(loss := loss.detach())
    if dist.get_rank() == 0:
        print(f"step {step}: loss {loss / dist.get_world_size():.5f}", flush=True)
dist.destroy_process_group()
