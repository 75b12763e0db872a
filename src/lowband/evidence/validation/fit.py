"""The fitted constants of a machine and its stacks again: least squares of relative errors within bounds.

Constants that share a row are fitted together, on all of their rows; the others keep the values of the files.
The solver starts at the file's values, moved into the bounds, and at the middle of the bounds: terms with a
maximum (overlap, rings) can have several minima.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from scipy.optimize import least_squares

from lowband.cost.numbers import Num
from lowband.errors import UserError
from lowband.evidence.validation import SOURCES, PublishedRow, Source
from lowband.evidence.validation.validate import with_facts
from lowband.spec.config import Config
from lowband.spec.sourced import Bounds, Fact, Place

DIGITS = 3  # of a fitted value
STEP = 1e-3  # of a derivative, as a share of the range between the bounds


@dataclass(frozen=True)
class Fitted:
    """A constant fitted again. value: the file's; within: the best one in the bounds; each with its place.

    fit_error_percent, held_out_error_percent: mean |predicted / published - 1| of the machine's sources with
    the files' values; within_...: with all of the machine's constants fitted again
    """

    cluster: str
    constant: str
    value: float
    value_place: Place
    within: float
    lower_bound: float
    upper_bound: float
    place: Place
    fit_error_percent: float
    within_fit_error_percent: float
    held_out_error_percent: float
    within_held_out_error_percent: float


def fitted_clusters(config: Config) -> list[str]:
    """The clusters on which some constant was fitted."""
    clusters = dict.fromkeys(source.cluster for source in SOURCES.values())
    return [cluster for cluster in clusters if _constants(config, cluster)]


def fit(config: Config, cluster: str) -> list[Fitted]:
    """Fit a cluster's constants again. Raises UserError if it has none."""
    constants = _constants(config, cluster)
    if not constants:
        raise UserError(f"no constant was fitted on '{cluster}'", allowed=fitted_clusters(config))
    shipped = {place: fact.value for place, fact in constants.items()}
    values = dict(shipped)
    for together in _groups(constants):
        group = {place: constants[place] for place in together}
        values |= solve(group, _errors_on_their_rows(config, cluster, group, dict(values)))
    before, after = _errors(config, cluster, shipped), _errors(config, cluster, values)
    return [
        Fitted(
            cluster, place, fact.value, fact.bounds.place(fact.value), values[place], fact.bounds.low,
            fact.bounds.high, fact.bounds.place(values[place]), before[0], after[0], before[1], after[1],
        )
        for place, fact in constants.items() if fact.bounds is not None
    ]  # fmt: skip


def table(fitted: Sequence[Fitted]) -> pd.DataFrame:
    """Rows of `within_bounds.csv`."""
    return pd.DataFrame([{"provenance": "predicted", **asdict(one)} for one in fitted])


def _constants(config: Config, cluster: str) -> dict[str, Fact]:
    found: dict[str, Fact] = {}
    for source in _sources(cluster):
        machine, stack = source.on(config)
        found |= {place: fact for place, fact in (machine.facts | stack.facts).items() if fact.calibrated_on}
    return found


def _sources(cluster: str) -> list[Source]:
    return [source for source in SOURCES.values() if source.cluster == cluster]


def _groups(constants: Mapping[str, Fact]) -> list[list[str]]:
    """Places of constants that share rows, those with the fewest rows first."""
    groups: list[tuple[set[str], list[str]]] = []
    for place, fact in constants.items():
        rows, places = set(fact.calibrated_on), [place]
        for other in [group for group in groups if group[0] & rows]:
            groups.remove(other)
            rows, places = rows | other[0], [*other[1], *places]
        groups.append((rows, places))
    return [places for _, places in sorted(groups, key=lambda group: len(group[0]))]


def _errors_on_their_rows(
    config: Config, cluster: str, constants: Mapping[str, Fact], others: Mapping[str, float]
) -> Callable[[Mapping[str, float]], Sequence[float]]:
    """Values of `constants` -> errors on the rows they were fitted on; the other constants keep `others`."""
    ids = {row for fact in constants.values() for row in fact.calibrated_on}
    sources = [s for s in _sources(cluster) if any(row.id in ids for row in s.rows(config, *s.on(config)))]

    def errors(values: Mapping[str, float]) -> list[float]:
        rows = [row for s in sources for row in rows_with(config, s, {**others, **values})]
        return [float(row.predicted()) / row.published - 1 for row in rows if row.id in ids]

    return errors


def solve(
    constants: Mapping[str, Fact], errors: Callable[[Mapping[str, float]], Sequence[float] | NDArray[Any]]
) -> dict[str, float]:
    """The values of `constants` within their bounds that have the least squares of errors.

    errors: the relative errors of the rows to fit on, predicted with such values
    """
    bounds = [fact.bounds for fact in constants.values() if fact.bounds is not None]

    def value_of(unit: np.ndarray) -> dict[str, float]:
        """Values of coordinates from 1 (lower bound) to 2: there a relative step is an absolute one."""
        ends = zip(constants, bounds, unit, strict=True)
        return {place: b.low + (float(u) - 1) * (b.high - b.low) for place, b, u in ends}

    starts = [[_unit(fact.value, b) for fact, b in zip(constants.values(), bounds, strict=True)]]
    starts.append([1.5] * len(bounds))
    found = [
        least_squares(lambda unit: errors(value_of(unit)), start, bounds=(1, 2), diff_step=STEP, xtol=1e-6)
        for start in starts
    ]
    best = value_of(min(found, key=lambda one: float(one.cost)).x)
    return {place: float(f"{value:.{DIGITS}g}") for place, value in best.items()}


def _unit(value: float, bounds: Bounds) -> float:
    return float(np.clip(1 + (value - bounds.low) / (bounds.high - bounds.low), 1.01, 1.99))


def rows_with(config: Config, source: Source, values: Mapping[str, Num]) -> list[PublishedRow]:
    """The source's rows, predicted with other values of fitted constants of its machine and its stack."""
    machine, stack = source.on(config)
    places = {place for place, fact in (machine.facts | stack.facts).items() if fact.calibrated_on}
    own = {place: value for place, value in values.items() if place in places}
    return source.rows(config, *with_facts(machine, stack, own))


def _errors(config: Config, cluster: str, values: Mapping[str, float]) -> tuple[float, float]:
    """Mean error in percent of the rows that constants were fitted on, and of the held-out ones."""
    ids = {row for fact in _constants(config, cluster).values() for row in fact.calibrated_on}
    errors: dict[bool, list[float]] = {True: [], False: []}
    for source in _sources(cluster):
        for row in rows_with(config, source, values):
            errors[row.id in ids].append(100 * abs(float(row.predicted()) / row.published - 1))
    fitted, held_out = (float(np.mean(errors[use])) if errors[use] else np.nan for use in (True, False))
    return fitted, held_out
