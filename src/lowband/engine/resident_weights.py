"""Weights of host memory that stay on the device between uses, as far as the room for them goes.

Which: cost.residents, in the order in which the lane of the host copies them. That is the order in which they
were submitted, the same in every step; each rank decides for its own shards, and nothing is sent for it. All
tensors that stay are made in that lane, and so belong to its stream on a GPU.
"""

from collections.abc import Hashable

import torch

from lowband.cost.residents import Found, Residents


class ResidentWeights:
    """Of the units of one scheme. Only the lane of the host calls it, once there are steps."""

    def __init__(self, share: float) -> None:
        """share: of the bytes of all shards, those for which there is room"""
        self._share, self._bytes = share, 0
        self._residents = Residents[Hashable](0)
        self._tensors: dict[Hashable, torch.Tensor] = {}

    def add(self, size: int) -> int:
        """A shard of so many bytes; returns by how many the room grows."""
        self._bytes += size
        before, self._residents.capacity = self._residents.capacity, int(self._share * self._bytes)
        return self._residents.capacity - before

    def take(self, shard: Hashable, size: int) -> tuple[torch.Tensor | None, bool]:
        """The values, if they are there; and whether they stay, those that come now by `keep`."""
        found = self._residents.access(shard, size, is_new=False)
        values = self._tensors.get(shard) if found.was_there else None
        self._leave(found, shard)
        return values, found.stays

    def keep(self, shard: Hashable, values: torch.Tensor) -> None:
        self._tensors[shard] = values

    def renew(self, shard: Hashable, values: torch.Tensor) -> None:
        """New values, on the device; a copy of them may stay."""
        self._tensors.pop(shard, None)  # there is no room for both
        found = self._residents.access(shard, values.nbytes, is_new=True)
        self._leave(found, shard)
        if found.stays:
            self._tensors[shard] = values.clone()

    def _leave(self, found: Found[Hashable], shard: Hashable) -> None:
        for each in found.left:
            self._tensors.pop(each, None)
        if not found.stays:
            self._tensors.pop(shard, None)
