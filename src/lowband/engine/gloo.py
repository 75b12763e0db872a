"""Messages between partners over gloo, each with a deadline and a name that both ends must agree on.

[Note: pairs] Between two ranks of a group gloo moves data in one direction at a time. So a hop has two groups
of the same ranks: messages to later ranks use the first, messages to earlier ranks the second, and each
direction has its own connection.

[Note: tags] A message is received only under the tag that it was sent with. The tag is made from the name of
the collective, so ranks that run different collectives wait for each other until the timeout and fail,
instead of receiving each other's bytes.
"""

import zlib
from collections.abc import Sequence

import torch
import torch.distributed as dist


class PeerLost(RuntimeError):
    """A partner did not answer in time, or its connection broke. The text names both ranks."""


def exchange(
    sent: Sequence[torch.Tensor | None],
    received: Sequence[torch.Tensor | None],
    partners: Sequence[int],
    groups: tuple[dist.ProcessGroup, dist.ProcessGroup],
    name: str,
) -> None:
    """Send sent[i] to partner i and receive received[i] from it, all at once. None: no message.

    partners: global ranks, in order; this rank's own entries of `sent` and `received` are not used
    groups:   two groups of the partners: for messages to later ranks, and for messages to earlier ones
    name:     name of the collective; the same on every partner

    GPU tensors are copied through the CPU, because gloo's sends read host memory. Raises PeerLost.
    """
    if any(tensor is not None and tensor.is_cuda for tensor in received):
        arrived = [None if into is None else torch.empty_like(into, device="cpu") for into in received]
        exchange([None if out is None else out.cpu() for out in sent], arrived, partners, groups, name)
        for into, copy, partner in zip(received, arrived, partners, strict=True):
            if into is not None and copy is not None and partner != dist.get_rank():
                into.copy_(copy)
        return
    rank, tag = dist.get_rank(), zlib.crc32(name.encode()) >> 1  # gloo's tags have 31 bits
    works: list[tuple[int, dist.Work | None]] = []
    for out, into, partner in zip(sent, received, partners, strict=True):
        if partner == rank:
            continue
        to, back = groups if rank < partner else groups[::-1]
        try:
            if into is not None:
                works.append((partner, dist.irecv(into, partner, group=back, tag=tag)))
            if out is not None:
                works.append((partner, dist.isend(out, partner, group=to, tag=tag)))
        except RuntimeError as error:
            raise _lost(partner, name, error) from None
    for partner, work in works:
        try:
            if work is not None:
                work.wait()
        except RuntimeError as error:
            raise _lost(partner, name, error) from None


def _lost(partner: int, name: str, error: RuntimeError) -> PeerLost:
    rank, text = dist.get_rank(), str(error).splitlines()[0]
    if "imed out" in text:
        what = f"rank {rank} timed out waiting for rank {partner}"
        why = "it stopped, or the two ranks do not run the same modules in the same order"
    else:
        what, why = f"rank {rank} lost its connection to rank {partner}", text
    return PeerLost(f"{what} in {name}: {why}")
