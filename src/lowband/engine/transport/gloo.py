"""Messages between partners over gloo, each with a deadline and a name that both ends must agree on.

[Note: pairs] Between two ranks of a group gloo moves data in one direction at a time. So a hop has two groups
of the same ranks: messages to later ranks use the first, messages to earlier ranks the second, and each
direction has its own connection.

[Note: tags] A message is received only under the tag that it was sent with. The tag is made from the name of
the collective, so ranks that run different collectives wait for each other until the timeout and fail,
instead of receiving each other's bytes.

[Note: how long a message took] gloo sends a message when both ends are ready, so the partner that came later
sees how long the message itself took. Which of the two that is may change within a step, so sums of times do
not show it; the shortest time of a step's largest messages does. A rank can only wait for one partner after
another, and sees a message late if one before it was. So it waits last for whom it waited longest before.
"""

import threading
import time
import zlib
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist


class PeerLost(RuntimeError):
    """A partner did not answer in time, or its connection broke. The text names both ranks."""


class Message(NamedTuple):
    """What two partners exchanged at once. bytes: in both directions; seconds: until all of it had passed"""

    partner: int
    bytes: int
    seconds: float


class MessageTimes:
    """By partner, the shortest time of the largest messages since the last `take`. Lanes are threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._found: dict[int, Message] = {}
        self._waited_s: dict[int, float] = {}

    def order(self, partner: int) -> float:
        """A key to sort partners by: whom to wait for first."""
        return self._waited_s.get(partner, 0.0)

    def add(self, message: Message, waited_s: float) -> None:
        """waited_s: the part of its seconds in which this rank waited for no other partner"""
        with self._lock:
            self._waited_s[message.partner] = waited_s
            known = self._found.get(message.partner, message)
            self._found[message.partner] = min(known, message, key=lambda each: (-each.bytes, each.seconds))

    def take(self) -> dict[int, float]:
        """Seconds by partner. See [Note: how long a message took]."""
        with self._lock:
            found, self._found = self._found, {}
        return {partner: one.seconds for partner, one in found.items()}


def exchange(
    sent: Sequence[torch.Tensor | None],
    received: Sequence[torch.Tensor | None],
    partners: Sequence[int],
    groups: tuple[dist.ProcessGroup, dist.ProcessGroup],
    name: str,
    times: MessageTimes,
) -> None:
    """Send sent[i] to partner i and receive received[i] from it, all at once. None: no message.

    partners: global ranks, in order; this rank's own entries of `sent` and `received` are not used
    groups:   two groups of the partners: for messages to later ranks, and for messages to earlier ones
    name:     name of the collective; the same on every partner
    times:    to which the messages are added: see [Note: how long a message took]

    GPU tensors are copied through the CPU, because gloo's sends read host memory. Raises PeerLost.
    """
    if any(tensor is not None and tensor.is_cuda for tensor in (*sent, *received)):
        arrived = [None if into is None else torch.empty_like(into, device="cpu") for into in received]
        copies = [None if out is None else out.cpu() for out in sent]
        exchange(copies, arrived, partners, groups, name, times)
        for into, copy, partner in zip(received, arrived, partners, strict=True):
            if into is not None and copy is not None and partner != dist.get_rank():
                into.copy_(copy)
        return
    rank, tag = dist.get_rank(), zlib.crc32(name.encode()) >> 1  # gloo's tags have 31 bits
    works: dict[int, list[dist.Work | None]] = {}
    sizes: Counter[int] = Counter()
    start = before = time.perf_counter()
    for out, into, partner in zip(sent, received, partners, strict=True):
        if partner == rank:
            continue
        to, back = groups if rank < partner else groups[::-1]
        mine = works.setdefault(partner, [])  # both neighbours in a ring of two are one partner
        try:
            if into is not None:
                mine.append(dist.irecv(into, partner, group=back, tag=tag))
                sizes[partner] += into.nbytes
            if out is not None:
                mine.append(dist.isend(out, partner, group=to, tag=tag))
                sizes[partner] += out.nbytes
        except RuntimeError as error:
            raise lost(partner, name, error) from None
    for partner in sorted(works, key=times.order):
        wait(works[partner], partner, name)
        now = time.perf_counter()
        if sizes[partner]:
            times.add(Message(partner, sizes[partner], now - start), waited_s=now - before)
        before = now


def wait(works: Sequence[dist.Work | None], partner: int, name: str) -> None:
    """Wait for messages from or to a rank. Raises PeerLost."""
    try:
        for work in works:
            if work is not None:
                work.wait()
    except RuntimeError as error:
        raise lost(partner, name, error) from None


def lost(partner: int, name: str, error: RuntimeError) -> PeerLost:
    rank, text = dist.get_rank(), str(error).splitlines()[0]
    if "imed out" in text:
        what = f"rank {rank} timed out waiting for rank {partner}"
        why = "it stopped, or the two ranks do not run the same steps and modules in the same order"
    else:
        what, why = f"rank {rank} lost its connection to rank {partner}", text
    return PeerLost(f"{what} in {name}: {why}")
