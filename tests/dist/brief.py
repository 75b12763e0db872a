"""Waits for partners that end after a second, for tests in which ranks wait for each other in vain.

A short timeout of the job itself would also hold while its ranks start and make their groups.
"""

from collections.abc import Sequence
from datetime import timedelta

import torch.distributed as dist

from lowband.engine.transport import gloo


class Brief:
    """A message that is awaited for a second."""

    def __init__(self, work: dist.Work) -> None:
        self._work = work

    def wait(self) -> bool:
        return self._work.wait(timedelta(seconds=1))


def wait_briefly() -> None:
    """In this process, from now on, in all messages of the engine over gloo."""
    wait = gloo.wait

    def wait_a_second(works: Sequence[dist.Work | None], partner: int, name: str) -> None:
        wait([None if work is None else Brief(work) for work in works], partner, name)

    gloo.wait = wait_a_second
