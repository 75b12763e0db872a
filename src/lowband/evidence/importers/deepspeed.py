"""DeepSpeed's throughput timer: `epoch=0/micro_step=20/global_step=10, RunningAvgSamplesPerSec=..., ...`.

Its samples count all ranks; its GB are GiB.
"""

import re
from typing import Any

from lowband.cost.numbers import GIB
from lowband.evidence.importers import Malformed, number, whole

_MARK = "RunningAvgSamplesPerSec="
_LINE = re.compile(
    r"global_step=(?P<step>\d+), RunningAvgSamplesPerSec=[^,\s]+, CurrSamplesPerSec=(?P<samples>[^,\s]+), "
    r"MemAllocated=[^,\s]+GB, MaxMemAllocated=(?P<memory>[^,\s]+)GB\s*$"
)


def parse(line: str) -> dict[str, Any] | None:
    if _MARK not in line:
        return None
    found = _LINE.search(line)
    if found is None:
        raise Malformed("is cut off or from another version")
    return {
        "step": whole(found["step"], "step"),
        "samples_per_s": number(found["samples"], "CurrSamplesPerSec"),
        "peak_memory_bytes": number(found["memory"], "MaxMemAllocated") * GIB,
    }
