"""All ranks of the job, whatever axis they lie along."""

from typing import TypeVar

import torch.distributed as dist

T = TypeVar("T")


def everyones(mine: T) -> list[T]:
    """Every rank's value, by rank. Every rank must call it at once; seldom, because values are pickled."""
    values: list[T] = [mine] * dist.get_world_size()
    dist.all_gather_object(values, mine)
    return values


def speaks_for_all() -> bool:
    """Whether this is the rank that prints what all have to say."""
    return dist.get_rank() == 0
