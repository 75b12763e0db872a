"""All published rows with their predictions, and machines and stacks with other values of constants."""

from collections.abc import Mapping

import pandas as pd

from lowband.spec.config import Config
from lowband.spec.machine import Machine
from lowband.spec.stack import Stack
from lowband.validation import SOURCES


def validate(config: Config) -> pd.DataFrame:
    """One row per published number: predicted, error_percent, whether a constant was fitted on it."""
    found = []
    for name, source in SOURCES.items():
        machine, stack = source.on(config)
        fitted = {row for fact in (machine.facts | stack.facts).values() for row in fact.calibrated_on}
        for row in source.rows(config, machine, stack):
            predicted = row.predicted()
            found.append(
                {
                    "source": name,
                    "cluster": source.cluster,
                    "stack": source.stack,
                    "row": row.id,
                    "use": "calibration" if row.id in fitted else "held out",
                    "quantity": row.quantity,
                    "published": row.published,
                    "predicted": predicted,
                    "error_percent": 100 * (predicted / row.published - 1),
                    "reported_in": source.csv,
                    "note": row.note,
                }
            )
    return pd.DataFrame(found)


def with_facts(machine: Machine, stack: Stack, values: Mapping[str, float]) -> tuple[Machine, Stack]:
    """Both with new values of some facts, given by their paths in `Machine.facts` and `Stack.facts`."""
    data, software = machine.model_dump(), stack.model_dump()
    parts = {**data, **{level["name"]: level["link"] for level in data["levels"]}, "stack": software}
    for place, value in values.items():
        part = parts
        for key in place.split("."):
            part = part[int(key) if key.isdigit() else key]
        part |= {"value": value, "low": None, "high": None}
    return Machine.model_validate(data), Stack.model_validate(software)
