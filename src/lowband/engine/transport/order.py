"""Check that all ranks have submitted the same collectives, for back ends whose messages have no tags.

gloo's messages have tags (transport.gloo, [Note: tags]). NCCL and RCCL accept the next message on a group, so
ranks that ran different modules would compute with each other's bytes. So at the end of a step's last
backward each rank compares a running checksum of its submissions with that of the first rank to get there, by
one request to the job's store.
"""

import zlib

import torch.distributed as dist

from lowband.engine.transport.gloo import PeerLost


class Order:
    """The collectives that this rank has submitted along one axis."""

    def __init__(self, name: str, is_first: bool) -> None:
        """name: the same on all ranks that submit the same ones; is_first: on one of them"""
        self._key, self._round, self._sum, self._last = f"lowband/order/{name}", 0, 0, "none"
        self._is_first = is_first

    def note(self, name: str) -> None:
        """Note a submission; `name` is the same on every rank that runs the same program."""
        self._sum, self._last = zlib.crc32(name.encode(), self._sum), name

    def compare(self) -> None:
        """Raises PeerLost if the first rank to get here has submitted other collectives."""
        store = dist.distributed_c10d._get_default_store()
        mine = f"{self._sum:08x} {self._last}"
        first = store.compare_set(f"{self._key}/{self._round}", "", mine).decode()
        if self._is_first and self._round > 1:
            store.delete_key(f"{self._key}/{self._round - 2}")  # every rank has passed it
        self._round += 1
        if first != mine:
            raise PeerLost(
                f"rank {dist.get_rank()} and another rank do not run the same modules in the same order: "
                f"this one reached {self._last}, the other to {first.partition(' ')[2]}"
            )
