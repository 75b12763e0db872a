"""torchtitan's console: `step: 10  loss: 8.1  ...  memory: 1.2GiB(1%)  tps: 1,234  tflops: 5.6`.

`tps` is tokens per second per device. Older versions print no grad_norm or tflops.
"""

import re
from typing import Any

from lowband.cost.numbers import GIB
from lowband.evidence.importers import Malformed, number, whole

_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
_STEP = re.compile(r"\bstep:\s*(?P<step>\d+)\s+loss:")
_PAIR = re.compile(r"(?P<key>[a-z_]+):\s*(?P<value>\S+)")
_KEYS = {
    "loss": "loss",
    "grad_norm": "grad_norm",
    "tps": "tokens_per_s_per_rank",
    "tflops": "reported_tflops_per_rank",
}


def parse(line: str) -> dict[str, Any] | None:
    line = _COLOUR.sub("", line)
    start = _STEP.search(line)
    if start is None:
        return None
    pairs = {found["key"]: found["value"] for found in _PAIR.finditer(line, start.start())}
    if not line.rstrip().endswith("%"):
        raise Malformed("is cut off")
    for key in ("loss", "memory", "tps"):
        if key not in pairs:
            raise Malformed(f"no '{key}'")
    values: dict[str, Any] = {name: number(pairs[key], key) for key, name in _KEYS.items() if key in pairs}
    size, unit, _ = pairs["memory"].partition("GiB")
    if not unit:
        raise Malformed(f"memory is {pairs['memory']!r}")
    return {
        "step": whole(start["step"], "step"),
        **values,
        "peak_memory_bytes": number(size, "memory") * GIB,
    }
