"""Published runs, predicted: one file per kind of source, one entry here per machine that ran it.

A source file has `rows(setting)`: the published rows, predicted on the setting's machine. Rows on which a
constant of that machine's file was fitted are named there (`calibrated_on`); all others are held out.
"""

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import pandas as pd

from lowband.spec.config import Config
from lowband.spec.machine import Machine
from lowband.spec.model import ModelSpec
from lowband.spec.scheme import Scheme


@dataclass(frozen=True)
class PublishedRow:
    """One published number. predicted: computes ours; note: lists what is unknown about the run."""

    id: str
    quantity: str
    published: float
    predicted: Callable[[], float]
    note: str = ""


@dataclass(frozen=True)
class Setting:
    """The inputs for predicting a source's rows. reported: the source's CSV, every cell as text."""

    config: Config
    machine: Machine
    reported: Any  # a pandas.DataFrame, whose rows have no static types

    def scheme(self, name: str) -> Scheme:
        return self.config.scheme(name)

    def model(self, name: str) -> ModelSpec:
        return self.config.model(name)


@dataclass(frozen=True)
class Source:
    """kind: a file of this folder; cluster: a folder of slurm/; csv: a file of results/reported/."""

    kind: str
    cluster: str
    csv: str

    def rows(self, config: Config, machine: Machine) -> list[PublishedRow]:
        reported = pd.read_csv(
            config.root / "results" / "reported" / self.csv, dtype=str, keep_default_na=False
        )
        module = import_module(f"lowband.validation.{self.kind}")
        rows: list[PublishedRow] = module.rows(Setting(config, machine, reported))
        return rows


SOURCES: dict[str, Source] = {
    "frontier": Source("frontier", "frontier", "01_frontier_low_bandwidth_2501.04266.csv"),
    "zeropp": Source("zeropp", "dgx2", "02_zeropp_2306.10209.csv"),
    "megatron": Source("megatron", "selene-2021", "07_megatron_sc21_2104.04473.csv"),
    "seqpar": Source("seqpar", "selene-2022", "megatron_seqpar_table5_vs_calculon.csv"),
    "megatron-h100": Source("megatron_h100", "eos-2024", "megatron_weak_scaling_h100.csv"),
    "vtrain": Source("vtrain", "vtrain-a100", "vtrain_a100_single.csv"),
    "llm-foundry-h100": Source("llm_foundry", "dgx-h100", "llm_foundry_fsdp.csv"),
    "llm-foundry-a100": Source("llm_foundry", "dgx-a100", "llm_foundry_fsdp.csv"),
    "llm-foundry-a100-40gb": Source("llm_foundry", "dgx-a100-40gb", "llm_foundry_fsdp.csv"),
    "torchtitan-h100-memory": Source("torchtitan", "dgx-h100", "torchtitan.csv"),
    "torchtitan-h200-memory": Source("torchtitan", "dgx-h200", "torchtitan.csv"),
    "frontier-fsdp2": Source("fsdp2", "frontier", "frontier_and_a100_fsdp2.csv"),
    "dash": Source("dash", "frontier", "05_frontier_3d_2312.12705.csv"),
}
