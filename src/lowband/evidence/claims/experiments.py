"""config/experiments.yaml: the effort to test a claim, with the minutes and memory of shipped runs."""

from datetime import date
from pathlib import Path

import pandas as pd
from pydantic import Field, PositiveFloat, model_validator

from lowband.cost.numbers import GIB
from lowband.errors import UserError
from lowband.spec.config import Config
from lowband.spec.csv_tables import read_table
from lowband.spec.yaml_model import Strict, read_entries


class Measured(Strict):
    """Shipped runs: their wall times add up to an experiment's minutes."""

    runs: str = Field(description="a runs.csv, relative to experiments.yaml")
    suites: tuple[str, ...] = Field(min_length=1)


class Experiment(Strict):
    """An entry of experiments.yaml."""

    id: str
    title: str
    command: str = Field(default="", description="none: this artifact has no experiment for it")
    hardware: str
    human_minutes: PositiveFloat = Field(description="of attention, the set-up not counted; our judgement")
    measured: Measured | None = None
    shipped: date | None = Field(default=None, description="when the shipped results were measured")
    machine_minutes: PositiveFloat | None = Field(
        default=None, description="an upper bound, where nothing was measured"
    )
    time_limits: tuple[str, ...] = Field(
        default=(), description="suites; the time limits of their runs add up to an upper bound"
    )

    @model_validator(mode="after")
    def _one_source_of_minutes(self) -> "Experiment":
        given = (self.measured is not None, self.machine_minutes is not None, bool(self.time_limits))
        if sum(given) > 1:
            raise ValueError("minutes come from one of measured, machine_minutes and time_limits")
        return self

    def minutes(self, config: Path) -> float | None:
        """Machine minutes; None if there is no experiment. `config` is the folder of experiments.yaml.

        Raises UserError for a suite that is not there, or has no shipped runs.
        """
        if self.time_limits:
            return sum(run.time_limit_s for run in Config(config.parent).runs(self.time_limits)) / 60
        if self.measured is None:
            return self.machine_minutes
        return float(self._shipped_runs(self.measured, config)["wall_s"].sum()) / 60

    def memory_gib(self, config: Path) -> float | None:
        """Upper bound on the memory of all ranks of the largest run; None if nothing was measured.

        Ranks times the peak resident memory of the fullest: pages that ranks share count once per rank, so
        less is enough. Raises UserError for a suite without runs.
        """
        if self.measured is None:
            return None
        runs = self._shipped_runs(self.measured, config)
        runs = runs[runs["provenance"] == "measured"]
        return float((runs["ranks"] * runs["peak_memory_bytes_max"]).max()) / GIB

    @staticmethod
    def _shipped_runs(measured: Measured, config: Path) -> pd.DataFrame:
        path = config / measured.runs
        runs = read_table(path)
        if missing := sorted(set(measured.suites) - set(runs["suite"])):
            raise UserError(f"no run of suite '{missing[0]}'", where=path, allowed=set(runs["suite"]))
        return runs[runs["suite"].isin(measured.suites)]


def read_experiments(config: Path) -> dict[str, Experiment]:
    """The experiments by id, in file order. Raises UserError for an entry that does not fit."""
    path = config / "experiments.yaml"
    return read_entries(Experiment, path, "id")
