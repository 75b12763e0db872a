"""The states that a unit's weights can be in, and the memory that each takes."""

from enum import Enum


class UnitState(Enum):
    """N is the unit's padded element count; the sizes are of the compute dtype."""

    SHARDED = "only the shards are held: nothing beyond `weights` and `secondary`"
    GATHERING = "the whole unit is being gathered: N elements are held, but cannot be read yet"
    GATHERED = "the whole unit is in use: N elements are held"
