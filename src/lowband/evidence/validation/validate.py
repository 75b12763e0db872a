"""All published rows with their predictions, and machines and stacks with other values of constants."""

from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd

from lowband.cost.numbers import Num
from lowband.evidence.validation import CALIBRATION, ERRORS_SEEN, HELD_OUT, SOURCES
from lowband.predict.interval import with_slow_host
from lowband.spec.config import Config
from lowband.spec.machine import Machine
from lowband.spec.stack import Stack


def validate(config: Config) -> pd.DataFrame:
    """One row per published number: predicted, error_percent, whether a constant was fitted on it.

    slow_host: predicted with the slowest host that the stack leaves open (predict/interval.py)
    """
    found = []
    for name, source in SOURCES.items():
        machine, stack = source.on(config)
        fitted = {row for fact in (machine.facts | stack.facts).values() for row in fact.calibrated_on}
        rows, use = source.rows(config, machine, stack), ERRORS_SEEN if source.are_seen else HELD_OUT
        for row, slow in zip(rows, source.rows(config, machine, with_slow_host(stack)), strict=True):
            predicted = float(row.predicted())
            found.append(
                {
                    "source": name,
                    "cluster": source.cluster,
                    "stack": source.stack,
                    "year": source.year,
                    "device": machine.device.name,
                    "row": row.id,
                    "use": use if row.id not in fitted else CALIBRATION,
                    "quantity": row.quantity,
                    "published": row.published,
                    "predicted": predicted,
                    "error_percent": 100 * (predicted / row.published - 1),
                    "slow_host": float(slow.predicted()),
                    "reported_in": source.csv,
                    "note": row.note,
                }
            )
    return pd.DataFrame(found)


def with_facts(machine: Machine, stack: Stack, values: Mapping[str, Num]) -> tuple[Machine, Stack]:
    """Both with new values of some facts, given by their paths in `Machine.facts` and `Stack.facts`.

    Arrays of values make a grid: predictions are then arrays of its shape.
    """
    for place, value in values.items():
        first, *rest = place.split(".")
        if first == "stack":
            stack = _put(stack, rest, value)
        elif first in type(machine).model_fields:
            machine = _put(machine, [first, *rest], value)
        else:
            levels = [
                _put(level, ["link", *rest], value) if level.name == first else level
                for level in machine.levels
            ]
            machine = machine.model_copy(update={"levels": tuple(levels)})
    return machine, stack


def _put(part: Any, path: Sequence[str], value: Num) -> Any:
    """`part` with the value of the fact at `path`; not validated, so that it can be an array."""
    if not path:
        return part.model_copy(update={"value": value, "low": None, "high": None})
    key, *rest = path
    if isinstance(part, dict):
        entry = int(key) if key.isdigit() else key
        return {**part, entry: _put(part[entry], rest, value)}
    return part.model_copy(update={key: _put(getattr(part, key), rest, value)})
