"""Where a scheme's states lie: the level that each is sharded over, its tier, and how its replicas meet."""

from pydantic import Field, PrivateAttr

from lowband.spec.offload import Offload
from lowband.spec.step import SYNC_REDUCE, SYNC_SWAP, Collective
from lowband.spec.sync import Sync
from lowband.spec.tiers import DEVICE, Tier
from lowband.spec.yaml_model import Strict


class Placement(Strict):
    """The level that each state is sharded over: a level of the machine, or `self` (not sharded).

    Behind it, after an @, the tier in which the shards lie, if that is not the device: of the weights, and of
    what the optimizer has.
    """

    name: str
    weights: str = Field(description="level of the copy used for compute; @host, @disk: its tier")
    secondary: str | None = Field(default=None, description="level of a second copy kept for the backward")
    grads: str = Field(description="level of the gradient accumulator")
    optim: str = Field(description="level of fp32 master weights and Adam moments; @host, @disk: their tier")
    sync: Sync | None = Field(
        default=None, description="of replicas that meet seldom; none: all ranks average gradients every step"
    )
    offload: Offload | None = Field(
        default=None, description="of states in another tier, which parts; none: all, updated on the host"
    )
    resident: float = Field(
        default=0.0, ge=0, le=1,
        description="of weights in host memory the share for which there is room on the device between uses",
    )  # fmt: skip
    _optim_tier: Tier = PrivateAttr(default=DEVICE)  # written behind the level, as this one:
    _weights_tier: Tier = PrivateAttr(default=DEVICE)

    @property
    def weights_tier(self) -> Tier:
        """The tier of a rank's shards of the weights that it computes with."""
        return self._weights_tier

    @property
    def optim_tier(self) -> Tier:
        """The tier of the optimizer's shards: of fp32 master weights and Adam moments."""
        return self._optim_tier

    @property
    def parted(self) -> str | None:
        """The key by which a part of the states lies elsewhere: neither in stages nor with experts."""
        return "offload" if self.offload is not None else "resident" if self.resident else None

    @property
    def meeting(self) -> Collective:
        """The collective in which replicas meet."""
        return SYNC_REDUCE if self.sync is None or self.sync.has_anchor else SYNC_SWAP
