"""`lowband predict`: predictions from names or files, for single values or lists."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any, TypeVar

from lowband.cost.activations import Recompute
from lowband.predict.prediction import predict
from lowband.predict.render import record
from lowband.predict.workload import Schedule, Workload
from lowband.spec.machine import Machine, read_machine
from lowband.spec.model import ModelSpec, read_model
from lowband.spec.scheme import Scheme, read_scheme
from lowband.spec.yaml_model import Strict, read_yaml

T = TypeVar("T", bound=Strict)


def machine_of(root: Path, name: str, stack: str = "machine") -> Machine:
    """The machine of a cluster's name or a machine file. stack `engine`: ours, instead of the file's."""
    machine = _from_file(Machine, name) or read_machine(root, name)
    return machine.model_copy(update={"stack": None}) if stack == "engine" else machine


def model_of(root: Path, name: str) -> ModelSpec:
    """The model of a name in config/models.yaml, or of a file with one model's keys."""
    return _from_file(ModelSpec, name) or read_model(root / "config" / "models.yaml", name)


def scheme_of(root: Path, name: str) -> Scheme:
    """The scheme of a name in config/schemes.yaml, or of a file with one scheme's keys."""
    return _from_file(Scheme, name) or read_scheme(root / "config" / "schemes.yaml", name)


def _from_file(cls: type[T], name: str) -> T | None:
    path = Path(name)
    if path.suffix not in (".yaml", ".yml"):
        return None
    stem = path.parent.name if path.name == "machine.yaml" else path.stem
    return cls.parse({"name": stem, **read_yaml(path)}, path)


@dataclass(frozen=True)
class Grid:
    """The arguments of `lowband predict`: every combination of the lists' values is a point."""

    root: Path
    cluster: str
    model: Sequence[str]
    scheme: Sequence[str]
    gpus: Sequence[int]
    micro_batch: Sequence[int]
    accumulation: Sequence[int]
    seq: Sequence[int | None]
    recompute: Sequence[Recompute]
    tp: int = 1
    pp: int = 1
    interleave: int = 1
    schedule: Schedule = "1f1b"
    stack: str = "machine"

    def jobs(self) -> Iterator[Workload]:
        machine = machine_of(self.root, self.cluster, self.stack)
        models = [model_of(self.root, name) for name in self.model]
        schemes = [scheme_of(self.root, name) for name in self.scheme]
        for model, scheme, ranks, b, a, seq, recompute in product(
            models, schemes, self.gpus, self.micro_batch, self.accumulation, self.seq, self.recompute
        ):
            yield Workload(
                machine, model, scheme, ranks, b, model.seq_len if seq is None else seq, a,
                recompute=recompute, tp=self.tp, pp=self.pp, interleave=self.interleave,
                schedule=self.schedule, sequence_parallel=self.tp > 1,
            )  # fmt: skip

    def records(self) -> list[dict[str, Any]]:
        """One record per point. Raises UserError for a point that is impossible or lacks a constant."""
        return [record(job, predict(job)) for job in self.jobs()]
