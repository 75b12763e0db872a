"""What a shard is a part of."""

from dataclasses import dataclass

import torch

from lowband.engine.units.slice_of import SliceOf


@dataclass(frozen=True)
class ShardOf:
    """The whole parameter behind a shard: attribute `shard_of` of each of the optimizer's parameters.

    name, shape: of the whole parameter in the original module
    start, stop: this rank's range of the flattened whole; in the shard, padding follows it
    ranks:       the ranks whose shards make up the whole, in the order of their ranges
    slice_of:    what this whole is a tensor rank's slice of, if it is one
    """

    name: str
    shape: torch.Size
    start: int
    stop: int
    ranks: tuple[int, ...]
    slice_of: SliceOf | None = None
