"""Facts about a shard that are those of the whole parameter: its number of dimensions.

A shard, its gradient and what is computed from them element by element are 1D in memory. Decay groups, and
rules for matrices in optimizers, are chosen by `ndim`. `shape`, `size()` and `numel()` are the part's own,
because optimizers allocate and launch by them.
"""

from typing import Any, NoReturn

import torch

from lowband.engine.units.shard_of import ShardOf
from lowband.errors import UserError


class SeenWhole(torch.Tensor):
    """A base of what may be a part of a whole parameter.

    shard_of: the whole; a tensor of another shape, made from a part, has none
    """

    shard_of: ShardOf

    @property
    def ndim(self) -> int:
        """Number of dimensions of the whole."""
        of = getattr(self, "shard_of", None)
        return len(self.shape) if of is None else len(of.shape)

    def dim(self) -> int:
        """Number of dimensions of the whole."""
        return self.ndim

    def size(self, dim: int | None = None) -> Any:
        """As that of a 1D tensor. Raises UserError for another dimension of a part."""
        if dim not in (None, 0, -1) and hasattr(self, "shard_of"):
            raise UserError(
                f"a shard is 1D, and has no size({dim})",
                where=self.shard_of.name,
                allowed="p.shard_of.shape, the shape of the whole; initial values by init= of lowband.shard; "
                "lowband.Matrices for optimizers of matrices",
            )
        return torch.Tensor.size(self, *(() if dim is None else (dim,)))  # type: ignore[arg-type]

    def __create_write_items__(self, name: str, _object: Any) -> NoReturn:
        """What torch.distributed.checkpoint calls to save it."""
        raise UserError(
            "torch.distributed.checkpoint would keep one rank's part",
            where=name,
            allowed="lowband.Checkpointer, lowband.save_safetensors, lowband.full_state_dict",
        )
