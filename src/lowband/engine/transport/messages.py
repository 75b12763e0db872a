"""Messages between two ranks of an axis: posted at once, awaited where they are used.

Each direction has a group of its own (transport.gloo, [Note: pairs]), and a message its name. Where messages
have no names (NCCL), those from one rank to another must be posted in the same order on both.
"""

import zlib
from collections.abc import Callable

import torch
import torch.distributed as dist

from lowband.engine.backend import backend
from lowband.engine.transport import gloo
from lowband.engine.transport.axis import Axis, new_group
from lowband.spec.mesh import SELF, WORLD


class Posted:
    """A message under way. It keeps the tensor."""

    def __init__(
        self,
        post: Callable[..., dist.Work | None],
        tensor: torch.Tensor,
        to: tuple[int, dist.ProcessGroup],
        name: str,
    ) -> None:
        self._tensor, (self._partner, group), self._name = tensor, to, name
        try:
            self._work = post(tensor, self._partner, group=group, tag=zlib.crc32(name.encode()) >> 1)
        except RuntimeError as error:
            raise gloo.lost(self._partner, name, error) from None

    def wait(self) -> torch.Tensor:
        """The message, once it has passed. Raises PeerLost after the job's timeout."""
        gloo.wait([self._work], self._partner, self._name)
        return self._tensor


class Messages:
    """Messages from and to single ranks along an axis.

    Every rank of the job must make the same ones in the same order, because that creates process groups.
    """

    def __init__(self, axis: Axis) -> None:
        self._rank, self._ranks = axis.rank, axis.ranks
        ring = axis.levels.ring(SELF, WORLD)
        self._groups = None if ring is None else (new_group(ring.hop), new_group(ring.hop))
        # gloo's sends read the host's memory
        self._is_gloo = backend() == "gloo"

    def send(self, tensor: torch.Tensor, place: int, name: str) -> Posted:
        """place: of the receiver along the axis"""
        message = tensor.detach().contiguous()
        return Posted(
            dist.isend, message.cpu() if self._is_gloo else message, self._to(place, sends=True), name
        )

    def receive(
        self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, place: int, name: str
    ) -> Posted:
        """place: of the sender along the axis"""
        into = torch.empty(shape, dtype=dtype, device="cpu" if self._is_gloo else device)
        return Posted(dist.irecv, into, self._to(place, sends=False), name)

    def _to(self, place: int, sends: bool) -> tuple[int, dist.ProcessGroup]:
        """The rank at a place, and the group for messages in that direction."""
        assert self._groups is not None
        partner = self._ranks[place]
        to_later, to_earlier = self._groups
        return partner, to_later if (self._rank < partner) == sends else to_earlier
