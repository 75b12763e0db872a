"""Times of the engine's collectives on a box's shaped links: rows of `comm.csv`.

Times each level's hop alone, as a gather and as a reduction, with messages sized to take a given time at the
links' rates.
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
from lowband.engine.collectives.collectives import Collectives
from lowband.engine.options import Options
from lowband.engine.transport.ledger import Ledger
from lowband.engine.transport.meter import MemoryMeter
from lowband.engine.transport.topology import Topology
from lowband.run.on_ranks import on_ranks
from lowband.spec.machine import Machine
from lowband.spec.scheme import Scheme

_START_S = 120  # for starting ranks and connecting them


class Timed(NamedTuple):
    """One collective of all ranks at once.

    partners:        ranks in a group
    bytes:           bytes that one rank sends, by the ledger
    interface_bytes: the kernel's count on rank 0's interface meanwhile; TCP and gloo add headers
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
    """Create the links in this private network and time every hop over them.

    seconds: target time of a collective at the links' rates
    """
    layout = Layout.of(machine, ranks)
    links.network_up(layout)
    return on_ranks(
        ranks,
        lambda: list(_time_hops(layout, seconds, repeats)),
        # Two collectives on up to 4 levels, one extra run each, and up to three times the target time.
        time_limit_s=_START_S + 3 * 8 * (repeats + 1) * seconds,
        enter=lambda rank: enter_place(layout.place(rank)),
    )[0]


def _time_hops(layout: Layout, seconds: float, repeats: int) -> Iterator[Timed]:
    scheme = Scheme.parse({"name": "bench", "weights": "self", "grads": "self", "optim": "self"}, "bench")
    ledger = Ledger()
    axis = Topology(layout.machine.sizes).along("data")
    collectives = Collectives(
        scheme, axis, ledger, MemoryMeter(), torch.device("cpu"), Options(overlap=False)
    )
    names = layout.levels.names
    for i in range(1, len(names)):
        inner, outer = names[i - 1], names[i]
        for bound in axis.hops(inner, outer):  # one; none if the level adds no ranks
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
                work()  # untimed: opens connections and TCP windows
                for repeat in range(1, repeats + 1):
                    took_s, sent, counted = _time(work, ledger)
                    yield Timed(
                        layout.machine.name, layout.levels.world, repeat, outer, name, count,
                        sent, counted, took_s, sent / rate,
                    )  # fmt: skip


def _time(work: Callable[[], object], ledger: Ledger) -> tuple[float, int, int]:
    """Seconds, bytes by the ledger, bytes by the interface.

    Timed from the first rank's start to the last one's end: ranks that start late find their links idle.
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
