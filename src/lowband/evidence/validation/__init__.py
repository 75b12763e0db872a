"""Published runs, predicted: one file per kind of source, one entry here per machine and stack that ran it.

A source file has `ROWS`: which rows of its CSV are predicted, and how one is. Rows on which a constant of a
machine or stack was fitted are named there (`calibrated_on`); all others are held out.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from importlib import import_module
from typing import Any, Literal

from lowband.cost.numbers import Num
from lowband.predict.defaults import with_defaults
from lowband.predict.request import job_of
from lowband.predict.workload import Workload
from lowband.spec.config import Config
from lowband.spec.csv_tables import read_published
from lowband.spec.machine import Machine
from lowband.spec.model import ModelSpec
from lowband.spec.scheme import Scheme
from lowband.spec.stack import Stack

Kind = Literal["size", "scale", "machine"]  # what a fold of a cross-validation leaves out
KINDS: tuple[Kind, ...] = ("size", "scale", "machine")
FITTED = "fitted"  # the outcome of a fold; any other says why it cannot be

# What a row's error says. A constant of the machine or stack was fitted on it; or, of all rows of a source, a
# default was chosen after their errors had been seen; or neither.
CALIBRATION, ERRORS_SEEN, HELD_OUT = "calibration", "errors seen", "held out"


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


@dataclass(frozen=True)
class Setting:
    """The inputs for predicting a source's rows. reported: the source's CSV, every cell as text."""

    config: Config
    machine: Machine
    stack: Stack
    reported: Any  # a pandas.DataFrame, whose rows have no static types

    @property
    def names(self) -> dict[str, str]:
        """The machine and the stack, as columns of a table."""
        return {"cluster": self.machine.name, "stack": self.stack.name}

    def scheme(self, name: str) -> Scheme:
        return self.config.scheme(name)

    def model(self, name: str) -> ModelSpec:
        return self.config.model(name)

    def job(
        self, model: ModelSpec, scheme: str, ranks: int, micro_batch: int, seq_len: int, **other: Any
    ) -> Workload:
        """A job on the machine and the stack. other: further arguments of `job_of`."""
        return job_of(
            self.machine, self.stack, model, self.scheme(scheme), ranks, micro_batch, seq_len, **other
        )


def shape(row: Any, **other: Any) -> ModelSpec:
    """A GPT of the row's layers, hidden and heads. other: further arguments of `ModelSpec`."""
    return ModelSpec(layers=int(row.layers), hidden=int(row.hidden), heads=int(row.heads), **other)


@dataclass(frozen=True, kw_only=True)
class Rows:
    """Which rows of a CSV are predicted, and how. Texts have the row's columns in braces.

    where:     the rows, if not all; more columns, if texts need them
    job, of:   a row's job, and our number of it. Called when a row is predicted: a fit predicts few of many
    published: the column of the published number
    id, quantity, size, scale, note: of `PublishedRow`
    """

    where: Callable[[Setting], Any] = lambda setting: setting.reported
    job: Callable[[Setting, Any], Any]
    of: Callable[[Any], Num]
    published: str = "value"
    id: str
    quantity: str
    size: str
    scale: str
    note: str = ""

    def on(self, setting: Setting) -> list[PublishedRow]:
        return [self._row(setting, row) for row in self.where(setting).itertuples()]

    def _row(self, setting: Setting, row: Any) -> PublishedRow:
        columns = row._asdict()
        id_, quantity, size, scale, note = (
            text.format(**columns) for text in (self.id, self.quantity, self.size, self.scale, self.note)
        )
        published = float(columns[self.published])
        return PublishedRow(
            id_, quantity, published, partial(self._predicted, setting, row), size, scale, note
        )

    def _predicted(self, setting: Setting, row: Any) -> Num:
        return self.of(self.job(setting, row))


@dataclass(frozen=True)
class Source:
    """kind: a file here; cluster: a folder of slurm/; stack: of config/stacks/; csv: of results/reported/

    year:     in which its rows were published: of the paper, or of the commit that brought the file
    are_seen: whether a default was chosen after the errors of its rows had been seen
    """

    kind: str
    cluster: str
    stack: str
    csv: str
    year: int
    are_seen: bool = False

    def on(self, config: Config) -> tuple[Machine, Stack]:
        """The machine and the stack that ran it."""
        return config.machine(self.cluster), config.stack_on(self.stack, self.cluster)

    def setting(self, config: Config) -> Setting:
        """Machine and stack as their files are, with nothing by default."""
        return Setting(config, *self.on(config), reported(config, self.csv))

    def rows(self, config: Config, machine: Machine, stack: Stack) -> list[PublishedRow]:
        rows: Rows = import_module(f"lowband.evidence.validation.{self.kind}").ROWS
        return rows.on(Setting(config, *with_defaults(machine, stack), reported(config, self.csv)))


@cache  # a fit reads it again and again
def reported(config: Config, csv: str) -> Any:
    """A file of results/reported/, every cell as text: a pandas.DataFrame, whose rows have no types."""
    return read_published(config.root / "results" / "reported" / csv)


def published_row(
    row: Any, quantity: str, use: str, setting: str, predicted: float, published: float | None = None
) -> dict[str, object]:
    """A row that sets a prediction beside a number of a paper. row: of `reported`

    use: `above` where the number is a lower bound, of which only a smaller prediction is off
    published: where the number is not the whole cell
    """
    published = float(row.value) if published is None else published
    off = 100 * (predicted / published - 1)
    return {
        "provenance": "predicted",
        "source": f"arXiv {row.arxiv}" if row.arxiv else row.source_url,
        "artifact": row.artifact, "quantity": quantity, "use": use, "setting": setting, "unit": row.unit,
        "published": published, "predicted": predicted,
        "off_percent": min(off, 0.0) if use == "above" else off,
    }  # fmt: skip


_SEEN = {"megatron-zero3"}  # before `defaults` took a stack's share of links from its other machines
SOURCES: dict[str, Source] = {
    name: Source(kind, cluster, stack, f"{csv}.csv", year, are_seen=name in _SEEN)
    for name, kind, cluster, stack, year, csv in (
        ("frontier", "frontier", "frontier", "deepspeed-zero", 2025, "01_frontier_low_bandwidth_2501.04266"),
        ("zeropp", "zeropp", "dgx2", "deepspeed-zero", 2023, "02_zeropp_2306.10209"),
        ("megatron", "megatron", "selene-2021", "megatron-lm-2021", 2021, "07_megatron_sc21_2104.04473"),
        (
            "megatron-zero3",
            "megatron_zero3",
            "selene-2021",
            "deepspeed-zero",
            2021,
            "07_megatron_sc21_2104.04473",
        ),
        ("seqpar", "seqpar", "selene-2022", "megatron-lm-2021", 2022, "megatron_seqpar_table5_vs_calculon"),
        ("megatron-h100", "megatron_h100", "eos-2024", "megatron-lm", 2024, "megatron_weak_scaling_h100"),
        ("dgxc-nemo-h100", "dgxc_nemo", "dgxc-h100", "megatron-lm", 2025, "dgxc_nemo_h100"),
        ("vtrain", "vtrain", "vtrain-a100", "megatron-lm-2021", 2024, "vtrain_a100_single"),
        ("llm-foundry-h100", "llm_foundry", "dgx-h100", "fsdp", 2024, "llm_foundry_fsdp"),
        ("llm-foundry-a100", "llm_foundry", "dgx-a100", "fsdp", 2023, "llm_foundry_fsdp"),
        ("llm-foundry-a100-40gb", "llm_foundry", "dgx-a100-40gb", "fsdp", 2023, "llm_foundry_fsdp"),
        ("torchtitan-h100-memory", "torchtitan", "dgx-h100", "fsdp2", 2024, "torchtitan"),
        ("torchtitan-h200-memory", "torchtitan", "dgx-h200", "fsdp2-2025", 2025, "torchtitan"),
        ("torchtitan-h100", "torchtitan_speed", "dgx-h100", "fsdp2", 2024, "torchtitan"),
        ("torchtitan-h200", "torchtitan_speed", "dgx-h200", "fsdp2-2025", 2025, "torchtitan"),
        ("torchtitan-a100", "fsdp2", "dgx-a100", "fsdp2", 2024, "frontier_and_a100_fsdp2"),
        ("frontier-fsdp2", "fsdp2", "frontier", "fsdp2", 2025, "frontier_and_a100_fsdp2"),
        ("dash", "dash", "frontier", "deepspeed-zero", 2023, "05_frontier_3d_2312.12705"),
    )
}
