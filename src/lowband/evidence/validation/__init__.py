"""Published runs, predicted: one file per kind of source, one entry here per machine and stack that ran it.

A source file has `rows(setting)`: the published rows, predicted on the setting's machine and stack. Rows on
which a constant of either was fitted are named there (`calibrated_on`); all others are held out.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any, Literal

import pandas as pd

from lowband.cost.numbers import Num
from lowband.spec.config import Config
from lowband.spec.machine import Machine
from lowband.spec.model import ModelSpec
from lowband.spec.scheme import Scheme
from lowband.spec.stack import Stack

Kind = Literal["size", "scale", "machine"]  # what a fold of a cross-validation leaves out
KINDS: tuple[Kind, ...] = ("size", "scale", "machine")
FITTED = "fitted"  # the outcome of a fold; any other says why it cannot be


@dataclass(frozen=True)
class PublishedRow:
    """One published number. note: lists what is unknown about the run.

    predicted:   computes ours; an array if the setting's constants are arrays
    size, scale: names of the model and of the number of ranks; a fold leaves out all rows of one name
    """

    id: str
    quantity: str
    published: float
    predicted: Callable[[], Num]
    size: str
    scale: str
    note: str = ""


def ranks_name(ranks: int) -> str:
    """The name of a number of ranks."""
    return f"{ranks} GPUs"


@dataclass(frozen=True)
class Setting:
    """The inputs for predicting a source's rows. reported: the source's CSV, every cell as text."""

    config: Config
    machine: Machine
    stack: Stack
    reported: Any  # a pandas.DataFrame, whose rows have no static types

    def scheme(self, name: str) -> Scheme:
        return self.config.scheme(name)

    def model(self, name: str) -> ModelSpec:
        return self.config.model(name)


@dataclass(frozen=True)
class Source:
    """kind: a file here; cluster: a folder of slurm/; stack: of config/stacks/; csv: of results/reported/."""

    kind: str
    cluster: str
    stack: str
    csv: str

    def on(self, config: Config) -> tuple[Machine, Stack]:
        """The machine and the stack that ran it."""
        return config.machine(self.cluster), config.stack_on(self.stack, self.cluster)

    def rows(self, config: Config, machine: Machine, stack: Stack) -> list[PublishedRow]:
        reported = _reported(config.root / "results" / "reported" / self.csv)
        module = import_module(f"lowband.evidence.validation.{self.kind}")
        rows: list[PublishedRow] = module.rows(Setting(config, machine, stack, reported))
        return rows


@cache  # a fit reads it again and again
def _reported(path: Path) -> pd.DataFrame:
    return pd.read_csv(path, dtype=str, keep_default_na=False)


SOURCES: dict[str, Source] = {
    name: Source(kind, cluster, stack, f"{csv}.csv")
    for name, kind, cluster, stack, csv in (
        ("frontier", "frontier", "frontier", "deepspeed-zero", "01_frontier_low_bandwidth_2501.04266"),
        ("zeropp", "zeropp", "dgx2", "deepspeed-zero", "02_zeropp_2306.10209"),
        ("megatron", "megatron", "selene-2021", "megatron-lm-2021", "07_megatron_sc21_2104.04473"),
        ("megatron-zero3", "megatron_zero3", "selene-2021", "deepspeed-zero", "07_megatron_sc21_2104.04473"),
        ("seqpar", "seqpar", "selene-2022", "megatron-lm-2021", "megatron_seqpar_table5_vs_calculon"),
        ("megatron-h100", "megatron_h100", "eos-2024", "megatron-lm", "megatron_weak_scaling_h100"),
        ("vtrain", "vtrain", "vtrain-a100", "megatron-lm-2021", "vtrain_a100_single"),
        ("llm-foundry-h100", "llm_foundry", "dgx-h100", "fsdp", "llm_foundry_fsdp"),
        ("llm-foundry-a100", "llm_foundry", "dgx-a100", "fsdp", "llm_foundry_fsdp"),
        ("llm-foundry-a100-40gb", "llm_foundry", "dgx-a100-40gb", "fsdp", "llm_foundry_fsdp"),
        ("torchtitan-h100-memory", "torchtitan", "dgx-h100", "fsdp2", "torchtitan"),
        ("torchtitan-h200-memory", "torchtitan", "dgx-h200", "fsdp2-2025", "torchtitan"),
        ("frontier-fsdp2", "fsdp2", "frontier", "fsdp2", "frontier_and_a100_fsdp2"),
        ("dash", "dash", "frontier", "deepspeed-zero", "05_frontier_3d_2312.12705"),
    )
}
