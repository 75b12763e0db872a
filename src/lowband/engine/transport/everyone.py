"""All ranks of the job, whatever axis they lie along."""

import warnings
from typing import TypeVar

import torch.distributed as dist

from lowband.errors import UserError

T = TypeVar("T")
_CALLS_OF = "lowband/everyones/{}"  # the key of a rank's number of calls
_NAMED = 8  # missing ranks in an error


def everyones(mine: T) -> list[T]:
    """Every rank's value, by rank. Every rank must call it at once; seldom, because values are pickled.

    Raises UserError that names the ranks that have not called it in the default group's timeout, and
    RuntimeError if one that has is lost.
    """
    store = dist.distributed_c10d._get_default_store()
    calls = store.add(_CALLS_OF.format(dist.get_rank()), 1)
    values: list[T] = [mine] * dist.get_world_size()
    try:
        dist.all_gather_object(values, mine)
    except RuntimeError:  # a time limit, or a connection that a rank has closed which went on and ended
        missing = [rank for rank in range(len(values)) if store.add(_CALLS_OF.format(rank), 0) < calls]
        if not missing:
            raise
        named = ", ".join(map(str, missing[:_NAMED])) + ", ..." * (len(missing) > _NAMED)
        raise UserError(
            f"{len(missing)} of the job's {len(values)} ranks have not made the same call: {named}",
            where="lowband.Topology, lowband.shard and the like",
            allowed="calls by every rank of the job, in the same order",
        ) from None
    return values


def speaks_for_all() -> bool:
    """Whether this is the rank that prints what all have to say."""
    return dist.get_rank() == 0


def warn(text: str) -> None:
    """One line, on the rank that speaks for all."""
    if speaks_for_all():  # explicitly, because otherwise a second line shows the source of this one
        warnings.warn_explicit(text, UserWarning, "lowband.shard", 0)


def to_send(error: Exception) -> Exception:
    """The error in a form that can be pickled: one line that names the file or the rank."""
    if isinstance(error, UserError):
        return error
    if isinstance(error, OSError) and error.filename is not None:
        return UserError(f"cannot be read or written: {error.strerror}", where=error.filename)
    first_line = next(iter(str(error).splitlines()), "")
    return RuntimeError(f"rank {dist.get_rank()}: {type(error).__name__}: {first_line}")
