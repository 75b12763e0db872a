"""Cases one by one, each in processes of its own: what breaks one leaves the next alone.

They are forked from this process, which has imported torch and transformers and must never run autograd.
"""

import contextlib
import os
import re
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from lowband.run.launch import RankFailure, TimeLimit
from lowband.run.on_ranks import on_ranks
from tests.wide.cases import Case
from tests.wide.observed import largest
from tests.wide.plain import run_plain
from tests.wide.sharded import run_sharded

PLAIN_S = 120.0


@dataclass(frozen=True)
class Outcome:
    """What became of a case.

    largest: relative difference, if the ranks came to the end
    said: where it is, if it is wrong; of an error its first line, with its class
    """

    case: Case
    outcome: Literal["right", "wrong", "refused", "unclear", "hang"]
    largest: float | None
    said: str
    seconds: float

    @property
    def wrong(self) -> str:
        """ "" where all is well: right, or refused as it may be."""
        may_be = any(each in self.said for each in self.case.may_be_refused)
        if self.outcome == "right" or (self.outcome == "refused" and may_be):
            return ""
        return f"{self.outcome}: {self.said}"


def tried(case: Case, limit_s: float) -> Outcome:
    """limit_s: how long the ranks may take until they count as hanging."""
    [expected] = on_ranks(1, run_plain, case, time_limit_s=PLAIN_S)
    start = time.monotonic()

    def ended(outcome: str, apart: float | None, said: str) -> Outcome:
        return Outcome(case, outcome, apart, said, time.monotonic() - start)  # type: ignore[arg-type]

    with tempfile.TemporaryDirectory() as folder:
        try:  # no rank gives up on another before it is seen that they hang
            seen = on_ranks(
                case.ranks, run_sharded, case, Path(folder), time_limit_s=limit_s, peer_timeout_s=2 * limit_s
            )
        except RankFailure as failure:
            said = re.sub(r"^rank \d+: ", "", failure.cause)
            return ended("refused" if said.startswith("UserError: ") else "unclear", None, said[:300])
        except TimeLimit:
            return ended("hang", None, f"ranks have not ended after {limit_s:g} s")
    apart, where = largest(seen, expected)
    is_right = apart <= case.bound
    return ended("right" if is_right else "wrong", apart, "" if is_right else where)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """What libraries print about each model goes nowhere, in forked processes too."""
    kept, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)
