"""Megatron-LM and Megatron-DeepSpeed: ` iteration 10/ 100 | key: value | ... |`."""

import re
from typing import Any

from lowband.evidence.importers import Malformed, number, whole

_ITERATION = re.compile(r"\biteration\s+(\S+?)\s*/\s*\S+\s*\|")
_KEYS = {
    "elapsed time per iteration (ms)": "step_time_s",
    "global batch size": "samples_per_step",
    "learning rate": "learning_rate",
    "lm loss": "loss",
    "grad norm": "grad_norm",
    "throughput per GPU (TFLOP/s/GPU)": "reported_tflops_per_rank",  # Megatron-LM
    "TFLOPs": "reported_tflops_per_rank",  # Megatron-DeepSpeed
}
_REQUIRED = ("step_time_s", "samples_per_step")  # loss and norm are missing where an iteration was skipped


def parse(line: str) -> dict[str, Any] | None:
    start = _ITERATION.search(line)
    if start is None:
        return None
    values: dict[str, Any] = {"step": whole(start.group(1), "iteration")}
    for part in line[start.end() :].split("|")[:-1]:
        key, colon, text = part.partition(":")
        key = key.strip()
        if key in _KEYS:
            if not colon:
                raise Malformed(f"no value for '{key}'")
            values[_KEYS[key]] = number(text, key)
    if not line.rstrip().endswith("|"):
        raise Malformed("is cut off")
    if missing := [name for name in _REQUIRED if name not in values]:
        raise Malformed(f"no '{next(key for key, name in _KEYS.items() if name == missing[0])}'")
    values["step_time_s"] /= 1e3
    return values
