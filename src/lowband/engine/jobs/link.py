"""Messages between the same rank of several jobs: a gloo group of their own."""

import time
from datetime import timedelta

import torch
import torch.distributed as dist

from lowband.engine.collectives.wire import decode, decode_sum, encode, is_plain
from lowband.spec.wire import Wire

PAUSE_S = 0.01
GRAIN = 8  # values; a quantized message is of a multiple of them (collectives.wire.encode)


class Link:
    """This rank and its counterparts in other jobs.

    sent_bytes: for means
    """

    def __init__(
        self,
        store: dist.Store,
        name: str,
        place: int,
        count: int,
        patience_s: float,
        come_s: float | None = None,
    ) -> None:
        """
        name:       of the group, the same on each of them, and of no group before
        place:      this rank's among them
        patience_s: for a message
        come_s:     for the others to come; default: the same

        Raises RuntimeError if they do not meet in time.
        """
        self._place, self._count = place, count
        store = dist.PrefixStore(f"quorum/links/{name}", store)
        store.set(str(place), "")
        come_s = patience_s if come_s is None else come_s
        until = time.monotonic() + come_s
        while not store.check([str(other) for other in range(count)]):  # gloo would wait for each in turn
            if time.monotonic() > until:
                raise RuntimeError(f"{name}: not all {count} counterparts came within {come_s:g} s")
            time.sleep(PAUSE_S)
        limit = timedelta(seconds=patience_s)
        self._group = dist.ProcessGroupGloo(store, place, count, limit) if count > 1 else None
        self.sent_bytes = 0

    def mean(self, values: torch.Tensor, wire: Wire, block_size: int) -> torch.Tensor:
        """The mean of everyone's values, 1D, fp32; equal bit by bit everywhere.

        Each sums a part of the values, in the order of the places, and sends the others its mean: of P values
        2 w P (n - 1) / n bytes, w of a value on the wire. Raises RuntimeError if a counterpart is lost.
        """
        if self._group is None:
            return values
        count, numel = self._count, values.numel()
        part = -(-numel // (count * GRAIN)) * GRAIN
        rows = values.new_zeros(count, part)
        rows.view(-1)[:numel] = values
        is_encoded = not is_plain(wire, values.dtype)
        messages = (encode(rows, wire, block_size) if is_encoded else rows).cpu()  # gloo sends host memory
        received = torch.empty_like(messages)
        self._group.alltoall_base(received, messages, [], []).wait()
        own = values.new_empty(part)
        decode_sum(received.to(values.device), own, wire if is_encoded else "fp32", block_size)
        own /= count
        mine = (encode(own.view(1, -1), wire, block_size)[0] if is_encoded else own).cpu()
        everyones = messages.new_empty(count, mine.numel())
        self._group.allgather([list(everyones)], [mine]).wait()
        self.sent_bytes += (count - 1) * 2 * mine.nbytes
        decode(everyones.to(values.device), rows, wire if is_encoded else "fp32", block_size)
        return rows.view(-1)[:numel]

    def send(self, values: torch.Tensor) -> None:
        """Send a 1D tensor to the other of two."""
        if values.numel():
            assert self._group is not None
            message = values.detach().cpu().contiguous().view(torch.uint8)
            self._group.send([message], 1 - self._place, 0).wait()

    def receive(self, values: torch.Tensor) -> None:
        """Fill a 1D tensor on the CPU with what the other of two sends."""
        if values.numel():
            assert self._group is not None
            self._group.recv([values.view(torch.uint8)], 1 - self._place, 0).wait()
