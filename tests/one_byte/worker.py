"""`python -m tests.one_byte.worker [--dies ROUND] [--waits ROUND] ...`: a worker of the campaign.

It is examples/one_byte.py with the other arguments; but it is killed before its step of a round, or waits
before it until another worker has asked to join.
"""

import argparse
import os
import runpy
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

import lowband

EXAMPLE = Path(__file__).parents[2] / "examples" / "one_byte.py"


def main() -> None:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--dies", type=int)
    parser.add_argument("--waits", type=int)
    options, arguments = parser.parse_known_args()
    step = lowband.OneByte.step

    def late_or_never(one: lowband.OneByte, loss_of: Callable[[], torch.Tensor]) -> float:
        if one.round == options.dies:
            os.kill(os.getpid(), signal.SIGKILL)
        while one.round == options.waits and not one._store.check(["one-byte/asking"]):
            time.sleep(0.01)
        return step(one, loss_of)

    lowband.OneByte.step = late_or_never  # type: ignore[method-assign]
    sys.path.insert(0, str(EXAMPLE.parent))
    sys.argv = [str(EXAMPLE), *arguments]
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
