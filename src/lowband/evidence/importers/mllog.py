"""MLPerf's mllog: `:::MLLOG {json}`. A step is a `train_loss` point with the samples seen so far.

A step's time is that between two points (or `run_start` and the first), divided by the steps between them.
"""

import json
from typing import Any

from lowband.evidence.importers import Malformed, Parser

_MARK = ":::MLLOG"


class _State:
    """Values from earlier lines."""

    batch: int | None = None
    time_ms: float | None = None
    samples = 0


def parser() -> Parser:
    state = _State()
    return lambda line: _parse(line, state)


def _parse(line: str, state: _State) -> dict[str, Any] | None:
    _, mark, text = line.partition(_MARK)
    if not mark:
        return None
    try:
        event = json.loads(text)
        key, value, time_ms = event["key"], event["value"], float(event["time_ms"])
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise Malformed(f"{type(error).__name__}: {error}") from None
    if key == "global_batch_size":
        state.batch = _count(value, key)
    elif key == "run_start":
        state.time_ms = time_ms
    elif key == "train_loss":
        return _step(event, time_ms, state)
    return None


def _step(event: dict[str, Any], time_ms: float, state: _State) -> dict[str, Any]:
    if state.batch is None:
        raise Malformed("train_loss before global_batch_size")
    metadata = event.get("metadata")
    if not isinstance(metadata, dict):
        raise Malformed("train_loss without metadata")
    samples = _count(metadata.get("samples_count"), "samples_count")
    loss = event["value"]
    if not isinstance(loss, int | float):
        raise Malformed(f"train_loss is {loss!r}")
    steps = (samples - state.samples) / state.batch
    is_timed = state.time_ms is not None and steps > 0 and time_ms > state.time_ms
    step_time_s = (time_ms - state.time_ms) / 1e3 / steps if is_timed and state.time_ms is not None else None
    state.time_ms, state.samples = time_ms, samples
    return {
        "step": samples // state.batch,
        "loss": float(loss),
        "step_time_s": step_time_s,
        "samples_per_step": state.batch,
    }


def _count(value: Any, what: str) -> int:
    if not isinstance(value, int | float) or not 1 <= value < 2**63:
        raise Malformed(f"{what} is {value!r}")
    return int(value)
