"""All published rows with their predictions, and the fit of a machine's calibrated constants."""

from collections.abc import Mapping

import numpy as np
import pandas as pd

from lowband.spec.config import Config
from lowband.spec.machine import Machine
from lowband.spec.stack import Stack
from lowband.validation import SOURCES

SPANS = {"_us": (0.0, 60_000.0), "_gib": (0.0, 16.0)}  # search range of a constant, by its unit
SPAN = (0.01, 1.0)  # search range of an efficiency
ROUNDS, TRIES = 7, 7


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


def fit(config: Config, cluster: str) -> dict[str, float]:
    """Fit a cluster's calibrated constants: minimise the mean squared relative error on their rows.

    Each constant in turn is tried at TRIES values in a range around the best so far; the range halves each
    round. Constants fitted on the same rows are fitted together.
    """
    machine = config.machine(cluster)
    stack = config.given_stack(None, machine)
    places = {place: fact for place, fact in (machine.facts | stack.facts).items() if fact.calibrated_on}
    best = {place: fact.value for place, fact in places.items()}
    for rows in sorted({fact.calibrated_on for fact in places.values()}, key=len):
        together = [place for place, fact in places.items() if fact.calibrated_on == rows]
        best = _descend(config, cluster, (machine, stack), best, together, set(rows))
    return {place: float(f"{value:.3g}") for place, value in best.items()}


def _error(config: Config, cluster: str, system: tuple[Machine, Stack], rows: set[str]) -> float:
    found = [
        row for source in SOURCES.values() if source.cluster == cluster
        for row in source.rows(config, *system) if row.id in rows
    ]  # fmt: skip
    return float(np.mean([(row.predicted() / row.published - 1) ** 2 for row in found]))


def _descend(
    config: Config,
    cluster: str,
    system: tuple[Machine, Stack],
    best: dict[str, float],
    places: list[str],
    rows: set[str],
) -> dict[str, float]:
    least = _error(config, cluster, with_facts(*system, best), rows)
    for i in range(2 * ROUNDS):
        for place in places:
            low, high = next((span for unit, span in SPANS.items() if place.endswith(unit)), SPAN)
            reach = (high - low) / 2 ** (i / 2 + 1)
            for value in np.linspace(max(low, best[place] - reach), min(high, best[place] + reach), TRIES):
                trial = {**best, place: float(value)}
                error = _error(config, cluster, with_facts(*system, trial), rows)
                if error < least:
                    best, least = trial, error
    return best
