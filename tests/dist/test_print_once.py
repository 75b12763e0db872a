"""An error that all ranks find: the first one does not leave while others still connect."""

import os
import sys
from io import StringIO
from types import SimpleNamespace

import torch.distributed as dist

from lowband.run import ranks
from lowband.run.on_ranks import on_ranks
from tests.waiting import HANG_S


def find_an_error(comes: bool) -> tuple[str, bool]:
    """What was printed, and whether the others had found it by then."""
    os.environ |= {"RANK": str(dist.get_rank()), "WORLD_SIZE": "2", "LOCAL_RANK": "0"}
    store = dist.distributed_c10d._get_default_store()
    ranks.ALIKE_S = HANG_S if comes else 0.1
    ranks.wait_for_first_process = lambda: None  # the launcher ends it
    sys.stderr = StringIO()
    if dist.get_rank() == 0 or comes:
        ranks.print_once("it is wrong")
    return sys.stderr.getvalue(), store.check(["lowband.failed.1"])


def test_the_first_waits_for_the_others() -> None:
    assert on_ranks(2, find_an_error, True, peer_timeout_s=HANG_S)[0] == ("it is wrong\n", True)


def find_an_error_without_a_store() -> str:
    os.environ |= {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "0"}
    ranks.wait_for_first_process = lambda: None

    def gone(*_: str) -> None:
        raise dist.DistNetworkError("Broken pipe")

    dist.distributed_c10d._get_default_store = lambda: SimpleNamespace(set=gone)
    sys.stderr = StringIO()
    ranks.print_once("it is wrong")
    return sys.stderr.getvalue()


def test_the_line_is_printed_where_the_store_is_gone() -> None:
    assert on_ranks(1, find_an_error_without_a_store) == ["it is wrong\n"]


def test_one_that_is_alone_with_its_error_leaves() -> None:
    assert on_ranks(2, find_an_error, False)[0] == ("it is wrong\n", False)
