"""Train under the placement that a DeepSpeed configuration asks for. Keys without a counterpart are refused.

torchrun --nproc-per-node 4 examples/from_deepspeed.py examples/ds_config.json

`lowband spec --from examples/ds_config.json --cluster frontier --ranks 384` prints it as a named scheme.
"""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from train import Block, ByteModel, batch

import lowband
from lowband.spec.exchange import read_deepspeed, scheme_of_deepspeed

TEXT = torch.arange(10_000) * 7 % 256


@lowband.one_line_errors()
def main() -> None:
    if len(sys.argv) != 2:
        raise lowband.UserError(f"{len(sys.argv) - 1} arguments", allowed="a DeepSpeed configuration")
    path = Path(sys.argv[1])
    config = read_deepspeed(path)
    dist.init_process_group("gloo")
    topology = lowband.Topology({"node": 2})  # ranks with fast links to each other
    scheme = scheme_of_deepspeed(config, topology.levels, str(path))
    torch.manual_seed(0)
    model = lowband.shard(ByteModel(), scheme, topology, wrap=Block)
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


if __name__ == "__main__":
    main()
