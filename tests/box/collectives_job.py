"""Times the engine's collectives on shaped links: run it in a private network. Prints one JSON line.

usage: collectives_job.py CLUSTER RANKS SECONDS
Each level's hop alone, gather and reduction, with messages that should take SECONDS by the links' rates.
"""

import json
import os
import sys
import tempfile
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from lowband.box import links
from lowband.box.layout import Layout
from lowband.engine.collectives import Collectives
from lowband.engine.ledger import Ledger
from lowband.engine.topology import Topology
from lowband.run.launch import run_local
from lowband.run.ranks import Rank
from lowband.spec.machine import read_machine
from lowband.spec.scheme import Scheme

ROOT = Path(__file__).parents[2]


def main(cluster: str, ranks: int, seconds: float) -> None:
    machine = read_machine(ROOT, cluster)
    layout = Layout.of(machine, ranks)
    links.network_up(layout)
    with tempfile.TemporaryDirectory() as folder:
        run_local(ranks, lambda rank: rank_main(rank, layout, seconds, Path(folder)), time_limit_s=120)
        print((Path(folder) / "0").read_text())


def rank_main(rank: Rank, layout: Layout, seconds: float, folder: Path) -> None:
    links.enter(layout.place(rank.rank).namespace)
    os.environ["GLOO_SOCKET_IFNAME"] = "eth0"
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=rank.init_method,
        rank=rank.rank,
        world_size=rank.world,
        timeout=timedelta(seconds=60),
    )
    ledger = Ledger()
    scheme = Scheme.parse({"name": "test", "weights": "self", "grads": "self", "optim": "self"}, "test")
    topology = Topology(layout.machine.sizes)
    collectives = Collectives(scheme, topology, ledger)
    rows = []
    names = layout.levels.names
    for i in range(1, len(names)):
        inner, outer = names[i - 1], names[i]
        hops = topology.hops(inner, outer)
        if not hops:
            continue
        count = hops[0].hop.count
        rate = layout.bytes_per_s(i)
        length = int(seconds * rate / 4 / (count - 1))
        shard, full = torch.ones(length), torch.ones(length * count)
        for name in ("gather", "reduce_scatter"):
            work = (
                (lambda s=shard, f=full, a=inner, b=outer: collectives.gather(s, f, a, b, "test"))
                if name == "gather"
                else (lambda f=full, a=inner, b=outer: collectives.reduce_scatter(f.clone(), a, b, "test"))
            )
            work()  # connections, windows
            dist.barrier()
            ledger.take()
            counted, start = links.sent_bytes(), time.monotonic()
            work()
            # From the first rank's start to the last one's end: ranks that start late find their links free.
            span = torch.tensor([-start, time.monotonic()], dtype=torch.float64)
            counted = links.sent_bytes() - counted
            logical = sum(sent.bytes for sent in ledger.take())
            dist.all_reduce(span, op=dist.ReduceOp.MAX)
            rows.append(
                {
                    "level": outer, "collective": name, "partners": count, "bytes": logical,
                    "interface_bytes": counted, "took_s": span.sum().item(), "closed_form_s": logical / rate,
                }
            )  # fmt: skip
    if rank.rank == 0:
        (folder / "0").write_text(json.dumps(rows))
    dist.barrier()
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), float(sys.argv[3]))
