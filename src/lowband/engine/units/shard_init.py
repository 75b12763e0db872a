"""Values are not drawn into shards: each rank would draw its own part, and copies of a part would differ.

torch.nn.init draws, and asks for the shape of the whole. A rank that holds nothing of a parameter would leave
some of its functions early, without the error that the others raise; so they are refused when they ask.
"""

import sys
from typing import Any, NoReturn

import torch

from lowband.engine.units.shard_of import ShardOf
from lowband.errors import UserError


class NotDrawn:
    """A base of ShardParameter, before torch's."""

    shard_of: ShardOf

    @property
    def shape(self) -> torch.Size:
        """The shard's: one dimension. Raises UserError if torch.nn.init asks."""
        self._check_asker()
        return torch.Tensor.shape.__get__(self)  # type: ignore[attr-defined, no-any-return]

    def ndimension(self) -> int:
        """The shard's: 1. Raises UserError if torch.nn.init asks."""
        self._check_asker()
        return 1

    def _check_asker(self) -> None:
        if sys._getframe(2).f_globals.get("__name__") == "torch.nn.init":
            self._refuse()

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        raise UserError(
            "values drawn after lowband.shard would be each rank's own",
            where=self.shard_of.name,
            allowed="initial values before lowband.shard, or by its init=; p.copy_(...) of values by hand",
        )

    normal_ = uniform_ = random_ = bernoulli_ = exponential_ = cauchy_ = log_normal_ = geometric_ = _refuse
