"""How long the engine's collectives take on a box's shaped links: rows of `comm.csv`.

Each level's hop alone, gather and reduction, with messages that should take a given time by the links' rates.
Runs in a private network (box.network.private_command).
"""

import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

import torch
import torch.distributed as dist

from lowband.box import links
from lowband.box.layout import Layout
from lowband.box.network import enter_place
from lowband.engine.collectives import Collectives
from lowband.engine.ledger import Ledger
from lowband.engine.memory import MemoryMeter
from lowband.engine.topology import Topology
from lowband.run.on_ranks import on_ranks
from lowband.spec.machine import Machine
from lowband.spec.scheme import Scheme

_START_S = 120  # ranks, connections


class Timed(NamedTuple):
    """One collective of all ranks at once.

    partners:        ranks in a group
    bytes:           what one rank sends, by the ledger
    interface_bytes: what the kernel counted on rank 0's interface meanwhile; TCP and gloo add headers
    took_s:          from the first rank's start to the last one's end
    closed_form_s:   bytes / rate of the shaped link
    """

    cluster: str
    ranks: int
    repeat: int
    level: str
    collective: str
    partners: int
    bytes: int
    interface_bytes: int
    took_s: float
    closed_form_s: float


def time_collectives(machine: Machine, ranks: int, seconds: float, repeats: int) -> list[Timed]:
    """Make the links in this private network and time every hop over them.

    seconds: what a collective should take by the links' rates
    """
    layout = Layout.of(machine, ranks)
    links.network_up(layout)
    return on_ranks(
        ranks,
        lambda: list(_time_hops(layout, seconds, repeats)),
        # Two collectives on up to 4 levels, once more than timed, each thrice as long as it should be.
        time_limit_s=_START_S + 3 * 8 * (repeats + 1) * seconds,
        enter=lambda rank: enter_place(layout.place(rank)),
    )[0]


def _time_hops(layout: Layout, seconds: float, repeats: int) -> Iterator[Timed]:
    scheme = Scheme.parse({"name": "bench", "weights": "self", "grads": "self", "optim": "self"}, "bench")
    ledger = Ledger()
    topology = Topology(layout.machine.sizes)
    collectives = Collectives(scheme, topology, ledger, MemoryMeter(), torch.device("cpu"), overlap=False)
    names = layout.levels.names
    for i in range(1, len(names)):
        inner, outer = names[i - 1], names[i]
        for bound in topology.hops(inner, outer):  # one, or none where a level has one group
            count, rate = bound.hop.count, layout.bytes_per_s(i)
            shard = torch.ones(int(seconds * rate / 4 / (count - 1)))
            full = torch.ones(len(shard) * count)
            along = {"inner": inner, "outer": outer, "name": "bench"}
            moves = {
                "gather": partial(collectives.gather, shard=shard, out=full, **along),
                "reduce_scatter": partial(collectives.reduce_scatter, full=full, **along),
            }
            for name, move in moves.items():
                work = partial(collectives.submit, "bench", [outer], move)
                work()  # connections, windows
                for repeat in range(1, repeats + 1):
                    took_s, sent, counted = _time(work, ledger)
                    yield Timed(
                        layout.machine.name, layout.levels.world, repeat, outer, name, count,
                        sent, counted, took_s, sent / rate,
                    )  # fmt: skip


def _time(work: Callable[[], object], ledger: Ledger) -> tuple[float, int, int]:
    """Seconds, bytes by the ledger, bytes by the interface.

    From the first rank's start to the last one's end: ranks that start late find their links free.
    """
    dist.barrier()
    ledger.take()
    before, start = links.sent_bytes(), time.monotonic()
    work()
    span = torch.tensor([-start, time.monotonic()], dtype=torch.float64)
    counted = links.sent_bytes() - before
    sent = sum(sent.bytes for sent in ledger.take())
    dist.all_reduce(span, op=dist.ReduceOp.MAX)
    return span.sum().item(), sent, counted
