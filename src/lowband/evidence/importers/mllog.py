"""MLPerf's mllog: `:::MLLOG {json}`. A step is a `train_loss` point with the samples seen so far.

A step's time is that between two points (or `run_start` and the first), divided by the steps between them.
The first point after a second `run_start` has none: the log does not say at which sample that attempt began.
"""

import json
from typing import Any

from lowband.evidence.importers import Malformed

_MARK = ":::MLLOG"


class Steps:
    """Line -> the step that it ends, from values of the lines before."""

    def __init__(self) -> None:
        self._batch: int | None = None
        self._time_ms: float | None = None
        self._samples = 0

    def __call__(self, line: str) -> dict[str, Any] | None:
        _, mark, text = line.partition(_MARK)
        if not mark:
            return None
        try:
            event = json.loads(text)
            key, value, time_ms = event["key"], event["value"], float(event["time_ms"])
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise Malformed(f"{type(error).__name__}: {error}") from None
        if key == "global_batch_size":
            self._batch = _count(value, key)
        elif key == "run_start":
            self._time_ms = None if self._samples else time_ms
        elif key == "train_loss":
            return self._step(event, time_ms)
        return None

    def _step(self, event: dict[str, Any], time_ms: float) -> dict[str, Any]:
        if self._batch is None:
            raise Malformed("train_loss before global_batch_size")
        metadata = event.get("metadata")
        if not isinstance(metadata, dict):
            raise Malformed("train_loss without metadata")
        samples = _count(metadata.get("samples_count"), "samples_count")
        loss, before_ms = event["value"], self._time_ms
        if not isinstance(loss, int | float):
            raise Malformed(f"train_loss is {loss!r}")
        steps, step_time_s = (samples - self._samples) / self._batch, None
        if before_ms is not None and steps > 0 and time_ms > before_ms:
            step_time_s = (time_ms - before_ms) / 1e3 / steps
        self._time_ms, self._samples = time_ms, samples
        return {
            "step": samples // self._batch, "loss": float(loss), "step_time_s": step_time_s,
            "samples_per_step": self._batch,
        }  # fmt: skip


def _count(value: Any, what: str) -> int:
    if not isinstance(value, int | float) or not 1 <= value < 2**63:
        raise Malformed(f"{what} is {value!r}")
    return int(value)
