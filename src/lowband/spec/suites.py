"""A suite -> complete run specs. A suite is one experiment: fixed values, cells, axes whose product is run
with each cell, and points left out.
"""

import math
import re
from collections.abc import Callable, Iterator, Mapping
from itertools import product
from pathlib import Path
from typing import Any

from pydantic import Field, PositiveInt, model_validator

from lowband.errors import UserError
from lowband.spec.axes import shown
from lowband.spec.machine import Machine
from lowband.spec.model import ModelSpec
from lowband.spec.run import RunSpec
from lowband.spec.run_options import RunOptions
from lowband.spec.scheme import Scheme
from lowband.spec.sourced import Magnitude
from lowband.spec.yaml_model import Strict

Value = bool | str | int | float | tuple[int, ...]

MOST_RUNS = 100_000  # of one suite

# The parts of a run's id, in this order; every other axis of a suite follows as key and value.
_IN_RUN_ID = ("model", "scheme", "ranks", "micro_batch", "global_batch", "seq_len", "repeat")

# Axes that tables and figures show as columns, lines and panels; the others make up a run's condition.
_SHOWN = ("model", "scheme", "ranks", "engine", "seq_len", "compute_dtype")


class Decides(Strict):
    """A ratio of throughputs per rank: of a scheme over another one, or over its own on fewer ranks."""

    scheme: str
    ranks: PositiveInt
    over: str | None = Field(default=None, description="the other scheme, on as many ranks")
    over_ranks: PositiveInt | None = Field(default=None, description="the fewer ranks")
    over_engine: str | None = Field(default=None, description="the engine of the other scheme; default: any")

    @model_validator(mode="after")
    def _over_one(self) -> "Decides":
        if (self.over is None) == (self.over_ranks is None):
            raise ValueError("give one of over and over_ranks")
        return self


class Suite(Strict):
    """`config/suites/<suite>.yaml`."""

    name: str
    purpose: str = Field(min_length=1, description="the suite's purpose, in one sentence")
    cluster: str = Field(description="a folder of slurm/ with a machine.yaml")
    repeats: PositiveInt = Field(
        default=1, le=MOST_RUNS, description="runs of each point, with seeds seed, seed+1, ..."
    )
    fixed: dict[str, Value] = Field(description="keys of a run with one value")
    axes: dict[str, list[Value]] = Field(default={}, description="keys of a run with several values")
    cells: list[dict[str, Value]] = Field(
        default=[], description="values of several keys of a run at once: each with every point of the axes"
    )
    exclude: list[dict[str, Value | list[Value]]] = Field(
        default=[], description="points to leave out, by any of their keys: a value, or several"
    )
    decides: dict[str, Decides] = Field(
        default={}, description="claims, by id, that its runs can decide, and the ratio that each is about"
    )


class Point(RunOptions):
    """One point of a suite before names are looked up. Either micro_batch or global_batch is given."""

    model: str
    scheme: str
    micro_batch: PositiveInt | None = None
    global_batch: PositiveInt | None = None
    outer_link: Magnitude = Field(default=1, description="what the rate of world's link is multiplied by")


def expand(
    suite: Suite,
    machine: Machine,
    model_of: Callable[[str], ModelSpec],
    scheme_of: Callable[[str], Scheme],
    where: Path,
) -> Iterator[RunSpec]:
    """Every run of a suite, in order. Raises UserError for an impossible point.

    machine: the suite's cluster; model_of, scheme_of: look up a name; where: the suite's file, for errors
    """
    groups = {
        "fixed": {*suite.fixed},
        "axes": {*suite.axes},
        "cells": {key for cell in suite.cells for key in cell},
    }
    for key in sorted(set().union(*groups.values())):
        places = [name for name, keys in groups.items() if key in keys]
        if len(places) > 1:
            raise UserError(f"'{key}' is in both {places[0]} and {places[1]}", where=where)
    unknown = [key for point in suite.exclude for key in point if key not in suite.axes]
    if unknown:
        raise UserError(f"exclude: '{unknown[0]}' is not an axis", where=where, allowed=suite.axes)
    cells = suite.cells or [{}]
    runs = len(cells) * math.prod(map(len, suite.axes.values())) * suite.repeats
    if runs > MOST_RUNS:
        raise UserError(f"axes and repeats make {runs:,} runs", where=where, allowed=f"at most {MOST_RUNS:,}")
    for cell, values in product(cells, product(*suite.axes.values())):
        point = {**cell, **dict(zip(suite.axes, values, strict=True))}
        if any(_matches(point, left) for left in suite.exclude):
            continue
        for repeat in range(1, suite.repeats + 1):
            yield _spec(suite, machine, model_of, scheme_of, where, point, repeat)


def _matches(point: Mapping[str, Value], left_out: Mapping[str, Value | list[Value]]) -> bool:
    for key, value in left_out.items():
        values = tuple(value) if isinstance(value, list | tuple) else (value,)
        if point[key] not in (*values, values):  # `layers: [2, 1]` is one value
            return False
    return True


def _spec(
    suite: Suite,
    machine: Machine,
    model_of: Callable[[str], ModelSpec],
    scheme_of: Callable[[str], Scheme],
    where: Path,
    varied: Mapping[str, Value],
    repeat: int,
) -> RunSpec:
    point = Point.parse({**suite.fixed, **varied}, where)
    values: dict[str, Any] = point.model_dump(exclude={"global_batch", "outer_link"})
    values["micro_batch"] = _micro_batch(point, where)
    values["seed"] = point.seed + repeat - 1
    values["model"] = model_of(point.model)
    values["scheme"] = scheme_of(point.scheme)
    extra = "".join(f"-{key}_{shown(value)}" for key, value in varied.items() if key not in _IN_RUN_ID)
    run_id = _file_name(
        f"{suite.name}-{point.model}-{point.scheme}-n{point.ranks:04d}-b{values['micro_batch']}"
        f"-s{point.seq_len}{extra}-r{repeat}"
    )
    return RunSpec.parse(
        {
            "run_id": run_id,
            "suite": suite.name,
            "repeat": repeat,
            "condition": ", ".join(
                f"{key} {shown(value)}" for key, value in varied.items() if key not in _SHOWN
            ),
            "scaling": "weak" if point.global_batch is None else "strong",
            "machine": machine if point.outer_link == 1 else machine.with_outer_link(point.outer_link),
            **values,
        },
        where,
    )


def _file_name(text: str) -> str:
    """The text made a valid file name on any system: it names a run's folder and logs."""
    return re.sub(r"[^A-Za-z0-9._+-]+", "_", text)


def _micro_batch(point: Point, where: Path) -> int:
    """Sequences per rank and backward pass, given or derived from the global batch."""
    if (point.micro_batch is None) == (point.global_batch is None):
        raise UserError("give one of micro_batch and global_batch", where=where)
    if point.micro_batch is not None:
        return point.micro_batch
    assert point.global_batch is not None
    data = point.degrees(point.ranks)["data"] // point.context
    parts = data * point.accumulation
    if point.global_batch % parts:
        raise UserError(
            f"global_batch {point.global_batch} is not a multiple of {data} ranks x "
            f"{point.accumulation} accumulation steps",
            where=where,
            allowed=f"multiples of {parts}",
        )
    return point.global_batch // parts
