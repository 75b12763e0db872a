"""torchtitan's console: `step: 10  loss: 8.1  ...  memory: 1.2GiB(1%)  tps: 1,234  tflops: 5.6`.

`tps` is tokens per second per device. Older versions print no grad_norm or tflops. Every rank whose output
the launcher keeps prints each step: the first one's line is taken.
"""

import re
from typing import Any

from lowband.cost.numbers import GIB
from lowband.evidence.importers import Malformed, number, whole

_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
_STEP = re.compile(r"(?<!validate )\bstep:\s*(?P<step>\d+)\s+loss:")
_PAIR = re.compile(r"(?P<key>[a-z_]+):\s*(?P<value>\S+)")
_KEYS = {
    "loss": "loss",
    "grad_norm": "grad_norm",
    "tps": "tokens_per_s_per_rank",
    "tflops": "reported_tflops_per_rank",
}


class Steps:
    """Line -> the step that it has; nothing if the last step was the same one, which is said once."""

    def __init__(self) -> None:
        self._step: int | None = None
        self._is_said = False

    def __call__(self, line: str) -> dict[str, Any] | None:
        values = parse(line)
        if values is None or values["step"] != self._step:
            self._step = self._step if values is None else values["step"]
            return values
        if self._is_said:
            return None
        self._is_said = True
        raise Malformed(f"step {self._step} once more, by another rank or a restart: the first is taken")


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
