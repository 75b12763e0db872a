"""DiLoCo over jobs that may end, and join again: each replica is a torchrun of its own.

python examples/diloco.py --host localhost:29400    # holds the store; ends last, by Ctrl-C
torchrun --standalone --nproc-per-node 2 examples/diloco.py --store localhost:29400 --replica 0 --begins 0 1
torchrun --standalone --nproc-per-node 2 examples/diloco.py --store localhost:29400 --replica 1 --begins 0 1

Kill one, and start it again by the same command: it is given the other's state after the next exchange.
"""

import argparse
import os
import signal
from pathlib import Path

import torch
import torch.distributed as dist
from train import Block, ByteModel, batch

import lowband

APART = 10**6  # between the seeds of two replicas' batches


@lowband.one_line_errors()
def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--host", help="host:port: hold the store there, and do nothing else")
    parser.add_argument("--store", help="host:port at which replicas meet")
    parser.add_argument("--replica", type=int, default=0)
    parser.add_argument("--begins", type=int, nargs="*", default=[], help="the replicas that begin")
    parser.add_argument("--every", type=int, default=10, help="H, steps from one exchange to the next")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--patience-s", type=float, default=60.0, help="for a replica, in an exchange")
    options = parser.parse_args()
    if options.host:
        _store = lowband.Quorum.store(options.host, hosts=True)
        signal.pause()
    if not options.store:
        raise lowband.UserError("no store", where="diloco.py", allowed="--store host:port, or --host")

    device = torch.device("cpu")
    if torch.cuda.is_available():
        torch.cuda.set_device(device := torch.device("cuda", int(os.environ["LOCAL_RANK"])))
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    torch.manual_seed(0)  # the same values on every rank of every replica
    topology = lowband.Topology({"node": dist.get_world_size()})
    outer = {"outer": "nesterov", "learning_rate": 0.7, "momentum": 0.9}
    sync = {"beyond": "node", "every": options.every, **outer}
    scheme = lowband.Scheme(name="diloco", weights="node", grads="node", optim="node", sync=sync)
    model = lowband.shard(ByteModel().to(device), scheme, topology, wrap=Block)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.97)
    quorum = lowband.Quorum(
        model, optimizer, lowband.Quorum.store(options.store), options.replica, options.begins,
        patience_s=options.patience_s, also={"schedule": schedule},
    )  # fmt: skip
    text = torch.tensor(list(Path(argparse.__file__).read_bytes()))
    while quorum.steps < options.steps:
        loss = model(batch(text, options.replica * APART + quorum.steps).to(device))
        loss.backward()
        lowband.clip_grad_norm_(model, 1.0)
        optimizer.step()  # the last one of a period exchanges
        optimizer.zero_grad()
        schedule.step()
        if quorum.steps % options.every == 0:
            dist.all_reduce(mean := loss.detach().clone())
            if dist.get_rank() == 0:
                with_whom = ", ".join(map(str, quorum.members))
                mean /= dist.get_world_size()
                print(f"step {quorum.steps}: loss {mean:.4f}, with replicas {with_whom}", flush=True)
    quorum.leave()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
