"""Cross-validation: the rows of each source, predicted with constants that were fitted without them.

A fold leaves out all rows of one model size, all of one scale (number of ranks), or a machine.

size, scale  the constants that were fitted on the source are fitted again on its other rows; constants that
             were fitted on another source keep their files' values
machine      all constants that were fitted on runs of the stack there take values that are fitted on the
             stack's runs on other machines, one value for all of these, which count alike. A constant that no
             other machine has is put in the middle of its bounds. A value beyond the machine's own bounds is
             moved onto them.

A source is predicted once on a grid of its constants; its folds are fitted on values interpolated there. The
rows left out are predicted by the model itself.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from scipy.interpolate import RegularGridInterpolator

from lowband.errors import UserError
from lowband.evidence.validation import FITTED, KINDS, SOURCES, Kind, PublishedRow
from lowband.evidence.validation.fit import rows_with, solve
from lowband.evidence.validation.tables import ROW_SEPARATOR
from lowband.evidence.validation.validate import with_facts
from lowband.predict.interval import with_slow_host
from lowband.spec.config import Config
from lowband.spec.sourced import Bounds, Fact

GRID = {1: 33, 2: 33, 3: 17}  # number of constants -> points of each
SPLITS: tuple[Kind, ...] = ("size", "scale")
ErrorsByRow = Callable[[Mapping[str, float]], NDArray[Any]]


@dataclass(frozen=True)
class Fold:
    """One fold of a source. outcome: FITTED, or why not.

    rows:          rows left out; fitted_rows: rows that the constants were fitted on
    values:        the constants, as place = value
    beyond_bounds: those on or outside their bounds
    unfitted:      those in the middle of their bounds, because no other machine has them
    """

    source: str
    cluster: str
    stack: str
    kind: Kind
    left_out: str
    outcome: str
    rows: int
    fitted_rows: int
    constants: int
    values: str = ""
    beyond_bounds: str = ""
    unfitted: str = ""


@dataclass(frozen=True)
class HeldOut:
    """A row that a fold left out, predicted by the fold's constants.

    slow_host: of a machine's fold, with the slowest host that is left open (predict/interval.py); else none
    """

    source: str
    kind: Kind
    left_out: str
    row: str
    quantity: str
    published: float
    predicted: float
    error_percent: float
    slow_host: float | None = None


def cross_validate(config: Config, clusters: Sequence[str] = ()) -> tuple[pd.DataFrame, pd.DataFrame]:
    """One row per fold, and one per row left out, of all sources on `clusters` (none: everywhere).

    Raises UserError for a cluster without a source.
    """
    known = list(dict.fromkeys(source.cluster for source in SOURCES.values()))
    for cluster in clusters:
        if cluster not in known:
            raise UserError(f"no published run is predicted on '{cluster}'", allowed=known)
    names = [name for name, source in SOURCES.items() if source.cluster in (clusters or known)]
    found = [each for name in names for each in _folds(config, name)]
    folds = pd.DataFrame([{"provenance": "predicted", **asdict(fold)} for fold, _ in found])
    held = pd.DataFrame([{"provenance": "predicted", **asdict(row)} for _, rows in found for row in rows])
    return folds, held


def _folds(config: Config, name: str) -> Iterator[tuple[Fold, list[HeldOut]]]:
    source, constants = SOURCES[name], _fitted_on(config, [name])
    rows = source.rows(config, *source.on(config))
    if not constants:
        for kind in KINDS:
            yield _not_fitted(name, kind, "all", "nothing was fitted on it", len(rows), 0, 0), []
        return
    errors = _errors_by_row(config, name, constants)
    for kind in SPLITS:
        labels = [getattr(row, kind) for row in rows]
        for label in dict.fromkeys(labels):
            left = np.array([other == label for other in labels])
            yield _without(config, name, kind, label, left, constants, errors)
    yield _without_machine(config, name, len(rows))


def _without(
    config: Config, name: str, kind: Kind, label: str, left: NDArray[Any], constants: Mapping[str, Fact],
    errors: ErrorsByRow,
) -> tuple[Fold, list[HeldOut]]:  # fmt: skip
    """The fold that leaves out some rows. left: one truth value per row; errors: of every row"""
    out, kept = int(left.sum()), int((~left).sum())
    if kept < len(constants):
        why = "fewer rows than constants" if kept else f"the only {kind}"
        return _not_fitted(name, kind, label, why, out, kept, len(constants)), []
    values = solve(constants, lambda tried: errors(tried)[~left])
    rows = rows_with(config, SOURCES[name], values)
    fold = _fold(name, kind, label, out, kept, constants, values)
    return fold, _held(name, kind, label, [row for row, is_out in zip(rows, left, strict=True) if is_out])


def _without_machine(config: Config, name: str, rows: int) -> tuple[Fold, list[HeldOut]]:
    """The fold that takes all constants of the source's machine and stack from the stack's other machines."""
    source = SOURCES[name]
    on_stack = [key for key, other in SOURCES.items() if other.stack == source.stack]
    here = [key for key in on_stack if SOURCES[key].cluster == source.cluster]
    others = [key for key in on_stack if key not in here and _fitted_on(config, [key])]
    constants = _fitted_on(config, here)
    if not others:
        why = f"no other machine of {source.stack}"
        return _not_fitted(name, "machine", source.cluster, why, rows, 0, len(constants)), []
    pooled = _pooled([_fitted_on(config, [key]) for key in others])
    by_source = {key: _errors_by_row(config, key, pooled) for key in others}

    def errors(values: Mapping[str, float]) -> NDArray[Any]:
        found: dict[str, list[float]] = {}
        for key, of_source in by_source.items():
            found.setdefault(SOURCES[key].cluster, []).extend(of_source(values))
        return np.concatenate([np.array(there) / np.sqrt(len(there)) for there in found.values()])

    fitted = solve(pooled, errors)
    ends = {place: (b.low, b.high) for place, fact in constants.items() if (b := fact.bounds) is not None}
    values = {
        place: float(np.clip(fitted.get(place, (low + high) / 2), low, high))
        for place, (low, high) in ends.items()
    }
    unfitted = [place for place in constants if place not in pooled]
    kept = len(errors(fitted))
    fold = _fold(name, "machine", source.cluster, rows, kept, constants, values, unfitted)
    held = _held(name, "machine", source.cluster, rows_with(config, source, values))
    machine, stack = with_facts(*source.on(config), values)
    if "stack.launch_us" in unfitted:
        stack = stack.model_copy(update={"launch_us": None})
    slow = source.rows(config, machine, with_slow_host(stack))
    return fold, [replace(one, slow_host=float(row.predicted())) for one, row in zip(held, slow, strict=True)]


def _errors_by_row(config: Config, name: str, constants: Mapping[str, Fact]) -> ErrorsByRow:
    """The relative error of each of the source's rows as a function of constants, by interpolation.

    The logarithm of the prediction is linear between points that are evenly spaced in the logarithm of a
    constant, or in the constant itself if it can be 0.
    """
    bounds = {place: b for place, fact in constants.items() if (b := fact.bounds) is not None}
    axes = [np.linspace(_scaled(b.low, b), _scaled(b.high, b), GRID[len(bounds)]) for b in bounds.values()]
    grid = np.meshgrid(*axes, indexing="ij")
    values = {
        place: np.exp(at) if b.low > 0 else at for (place, b), at in zip(bounds.items(), grid, strict=True)
    }
    rows = rows_with(config, SOURCES[name], values)
    logs = [np.log(np.broadcast_to(row.predicted(), grid[0].shape) / row.published) for row in rows]
    between = RegularGridInterpolator(axes, np.stack(logs, axis=-1))

    def errors(tried: Mapping[str, float]) -> NDArray[Any]:
        at = [_scaled(np.clip(tried[place], b.low, b.high), b) for place, b in bounds.items()]
        found: NDArray[Any] = np.expm1(between(at)[0])
        return found

    return errors


def _scaled(value: float, bounds: Bounds) -> float:
    return float(np.log(value) if bounds.low > 0 else value)


def _fitted_on(config: Config, names: Iterable[str]) -> dict[str, Fact]:
    """The constants that were fitted on rows of these sources, by their places."""
    found: dict[str, Fact] = {}
    for name in names:
        source = SOURCES[name]
        machine, stack = source.on(config)
        ids = {row.id for row in source.rows(config, machine, stack)}
        facts = machine.facts | stack.facts
        found |= {place: fact for place, fact in facts.items() if ids & set(fact.calibrated_on)}
    return found


def _pooled(constants: Sequence[Mapping[str, Fact]]) -> dict[str, Fact]:
    """One constant for each place, with bounds that hold those of every machine."""
    found: dict[str, Fact] = {}
    for place in dict.fromkeys(place for each in constants for place in each):
        facts = [each[place] for each in constants if place in each]
        ends = [(fact.bounds.low, fact.bounds.high) for fact in facts if fact.bounds is not None]
        bounds = Bounds(low=min(low for low, _ in ends), high=max(high for _, high in ends), source="all")
        value = float(np.mean([fact.value for fact in facts]))
        found[place] = facts[0].model_copy(update={"value": value, "bounds": bounds})
    return found


def _fold(
    name: str, kind: Kind, label: str, rows: int, fitted_rows: int, constants: Mapping[str, Fact],
    values: Mapping[str, float], unfitted: Iterable[str] = (),
) -> Fold:  # fmt: skip
    bounds = {place: fact.bounds for place, fact in constants.items() if fact.bounds is not None}
    beyond = [place for place, b in bounds.items() if b.place(values[place]) != "inside"]
    return replace(
        _not_fitted(name, kind, label, FITTED, rows, fitted_rows, len(constants)),
        values=ROW_SEPARATOR.join(f"{place} = {values[place]:.3g}" for place in constants),
        beyond_bounds=ROW_SEPARATOR.join(beyond),
        unfitted=ROW_SEPARATOR.join(unfitted),
    )


def _not_fitted(
    name: str, kind: Kind, label: str, why: str, rows: int, fitted_rows: int, constants: int
) -> Fold:
    source = SOURCES[name]
    return Fold(name, source.cluster, source.stack, kind, label, why, rows, fitted_rows, constants)


def _held(name: str, kind: Kind, label: str, rows: Iterable[PublishedRow]) -> list[HeldOut]:
    found = []
    for row in rows:
        predicted = float(row.predicted())
        error = 100 * (predicted / row.published - 1)
        found.append(HeldOut(name, kind, label, row.id, row.quantity, row.published, predicted, error))
    return found
