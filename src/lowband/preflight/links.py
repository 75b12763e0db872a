"""The rate of each level's links, with all ranks sending at once, and the ranks behind a slow one."""

import time
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
import torch.distributed as dist

from lowband.engine.collectives.hops import all_gather
from lowband.engine.transport.axis import Axis, BoundHop
from lowband.engine.transport.gloo import MessageTimes, exchange
from lowband.engine.transport.meeting import Meeting
from lowband.spec.mesh import SELF, WORLD

SECONDS = 1.0  # target duration of one level's messages
PROBE = 16  # a first, shorter measurement takes 1/16 of it at the expected rate
MOST_BYTES = 2**28  # of a rank's buffer
GUESS = 1e8  # bytes per second, for the probe of a link whose rate is not stated


class LevelRate(NamedTuple):
    """Bytes per second that this rank sent over a level in a gather among its partners."""

    level: str
    partners: int
    bytes_per_s: float


class PairRate(NamedTuple):
    """Bytes per second that this rank sent to one partner while it received as many."""

    partner: int
    bytes_per_s: float


def level_rate(
    axis: Axis, level: str, expected: float | None, device: torch.device, meeting: Meeting
) -> LevelRate:
    """Time a gather over one level, sized by a short probe: a slow link takes no longer than a fast one.

    expected: bytes per second; none: not stated
    """
    [bound] = [bound for bound in axis.hops(SELF, WORLD) if bound.hop.level == level]
    count = bound.hop.count

    def send(nbytes: float) -> float:
        """Bytes per second of a gather in which each rank sends about `nbytes`."""
        length = int(max(1, min(nbytes / (count - 1), MOST_BYTES / count)))
        mine = torch.ones(length, dtype=torch.uint8, device=device)
        out = mine.new_empty(count, len(mine))
        rounds = max(1, round(nbytes / ((count - 1) * mine.nbytes)))
        took = _timed(lambda: _gather(bound, mine, out, rounds), device, meeting)
        return rounds * (count - 1) * mine.nbytes / took

    send(1)  # opens connections
    rate = min(meeting.everyone(send(SECONDS / PROBE * (expected or GUESS))))
    return LevelRate(level, count, send(SECONDS * rate))


def pair_rates(
    axis: Axis, level: str, expected: float, device: torch.device, meeting: Meeting
) -> list[PairRate]:
    """This rank's rates with its neighbours in a level's group, one at a time: a slow rank is slow with each.

    expected: bytes per second; sets the messages' size
    """
    [bound] = [bound for bound in axis.hops(SELF, WORLD) if bound.hop.level == level]
    nbytes = int(max(1, min(SECONDS / PROBE * expected, MOST_BYTES)))
    message = torch.ones(nbytes, dtype=torch.uint8, device=device)
    found = []
    for pairs in _rounds(bound.hop.count):
        others = [other for pair in pairs if bound.coordinate in pair for other in pair]
        partner = next(
            (bound.hop.partners(axis.rank)[other] for other in others if other != bound.coordinate), None
        )
        took = _timed(partial(_swap, bound, partner, message), device, meeting)
        if partner is not None:
            found.append(PairRate(partner, nbytes / took))
    return found


def _rounds(count: int) -> list[list[tuple[int, int]]]:
    """Neighbours in a ring of so many, each once, in rounds in which nobody is in two pairs."""
    ring = [(place, (place + 1) % count) for place in range(count if count > 2 else 1)]
    even = count - count % 2
    return [pairs for pairs in (ring[0:even:2], ring[1:even:2], ring[even:]) if pairs]


def _gather(bound: BoundHop, mine: torch.Tensor, out: torch.Tensor, rounds: int) -> None:
    for i in range(rounds):
        if bound.back is None:
            all_gather(out.view(-1), mine, group=bound.group)
        else:
            bound.exchange([mine] * len(out), list(out), f"preflight of {bound.hop.level}, round {i}")


def _swap(bound: BoundHop, partner: int | None, message: torch.Tensor) -> None:
    if partner is None:
        return
    received = torch.empty_like(message)
    if bound.back is not None:
        groups = (bound.group, bound.back)
        exchange(
            [message],
            [received],
            [partner],
            groups,
            f"preflight of a pair over {bound.hop.level}",
            MessageTimes(),
        )
        return
    sends = dist.P2POp(dist.isend, message, partner, group=bound.group)
    receives = dist.P2POp(dist.irecv, received, partner, group=bound.group)
    for work in dist.batch_isend_irecv([sends, receives]):
        work.wait()


def _timed(work: Callable[[], None], device: torch.device, meeting: Meeting) -> float:
    """Seconds of `work` on this rank; all ranks start together."""
    meeting.everyone(None)
    start = time.perf_counter()
    work()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - start
