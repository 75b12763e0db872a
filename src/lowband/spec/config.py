"""The one reader of config/ and of the cluster files: models, schemes, machines, jobs and suites by name."""

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

from lowband.errors import UserError
from lowband.spec.job import SlurmRequest
from lowband.spec.machine import Machine
from lowband.spec.model import ModelSpec
from lowband.spec.run import RunSpec
from lowband.spec.scheme import Scheme
from lowband.spec.suites import Suite, expand
from lowband.spec.yaml_model import Strict, parse_entry, read_yaml

T = TypeVar("T", bound=Strict)


class Config:
    """The configuration under `root`, the folder that holds config/ and slurm/.

    A file is read on first use and then kept; a file that changes later needs a new Config. An unknown name
    raises UserError with the file or folder and the allowed names.
    """

    def __init__(self, root: Path = Path()) -> None:
        self.root = root
        self.models_file = root / "config" / "models.yaml"
        self.schemes_file = root / "config" / "schemes.yaml"
        self.suites_folder = root / "config" / "suites"
        self.clusters_folder = root / "slurm"
        self._read = cache(read_yaml)
        self._entry = cache(self._read_entry)

    @property
    def models(self) -> list[str]:
        return list(self._read(self.models_file))

    @property
    def schemes(self) -> list[str]:
        return list(self._read(self.schemes_file))

    @property
    def clusters(self) -> list[str]:
        return sorted(path.parent.name for path in self.clusters_folder.glob("*/machine.yaml"))

    @property
    def suites(self) -> list[str]:
        return sorted(path.stem for path in self.suites_folder.glob("*.yaml"))

    @property
    def default_suites(self) -> list[str]:
        """The suites that config/config.yaml lists."""
        path = self.root / "config" / "config.yaml"
        values = self._read(path)
        if "suites" not in values:
            raise UserError("no key 'suites'", where=path, allowed="a list of names in config/suites/")
        return [str(name) for name in values["suites"]]

    def model(self, name: str) -> ModelSpec:
        model: ModelSpec = self._entry(ModelSpec, self.models_file, name)
        return model

    def scheme(self, name: str) -> Scheme:
        scheme: Scheme = self._entry(Scheme, self.schemes_file, name)
        return scheme

    def machine(self, cluster: str, alike: tuple[str, ...] = ()) -> Machine:
        """The machine of `slurm/<cluster>/machine.yaml`, completed by the machine that it is `like`.

        alike: the chain of clusters that led here by `like`, each like the next
        """
        path = self.clusters_folder / cluster / "machine.yaml"
        if not path.exists():
            raise UserError(f"no cluster '{cluster}'", where=self.clusters_folder, allowed=self.clusters)
        values = dict(self._read(path))
        if "like" in values:
            chain = (*alike, cluster)
            like = str(values.pop("like"))
            if like in chain:
                raise UserError(f"like: {' -> '.join((*chain, like))} is circular", where=path)
            values = self.machine(like, chain).model_dump(exclude_none=True) | values
        return Machine.parse(values | {"name": cluster}, path)

    def has_slurm(self, cluster: str) -> bool:
        """Whether `slurm/<cluster>/` has a job.yaml."""
        return self._job_file(cluster).exists()

    def job(self, cluster: str) -> SlurmRequest:
        """The request in `slurm/<cluster>/`; without one, a default: one task starts all ranks of a node."""
        if not self.has_slurm(cluster):
            return SlurmRequest(tasks="node", cpus_per_rank=1)
        path = self._job_file(cluster)
        return SlurmRequest.parse(self._read(path), path)

    def suite(self, name: str) -> Suite:
        path = self._suite_file(name)
        if not path.is_file():
            raise UserError(f"no suite '{name}'", where=self.suites_folder, allowed=self.suites)
        return Suite.parse({"name": name, **self._read(path)}, path)

    def runs(self, suites: Sequence[str]) -> list[RunSpec]:
        """Every run of the suites, in order. Raises UserError for an impossible point or a repeated name."""
        specs: dict[str, RunSpec] = {}
        for name in suites:
            suite, where = self.suite(name), self._suite_file(name)
            for spec in expand(suite, self.machine(suite.cluster), self.model, self.scheme, where):
                if spec.run_id in specs:
                    raise UserError(f"two points are named '{spec.run_id}'", where=where)
                specs[spec.run_id] = spec
        return list(specs.values())

    # On the command line a user may give a file of their own, `*.yaml`, in place of a name.

    def given_model(self, given: str) -> ModelSpec:
        """The model of a name, or of a file with one model's keys."""
        return _own_file(ModelSpec, given) or self.model(given)

    def given_scheme(self, given: str) -> Scheme:
        """The scheme of a name, or of a file with one scheme's keys."""
        return _own_file(Scheme, given) or self.scheme(given)

    def given_machine(self, given: str) -> Machine:
        """The machine of a cluster's name, or of a machine file."""
        return _own_file(Machine, given) or self.machine(given)

    def _job_file(self, cluster: str) -> Path:
        return self.clusters_folder / cluster / "job.yaml"

    def _suite_file(self, name: str) -> Path:
        return self.suites_folder / f"{name}.yaml"

    def _read_entry(self, cls: type[Strict], path: Path, name: str) -> Any:
        entries = self._read(path)
        if name not in entries:
            raise UserError(f"no entry '{name}'", where=path, allowed=sorted(entries))
        return parse_entry(cls, entries[name], f"{path}: {name}", name=name)


def _own_file(cls: type[T], given: str) -> T | None:
    path = Path(given)
    if path.suffix not in (".yaml", ".yml"):
        return None
    stem = path.parent.name if path.name == "machine.yaml" else path.stem
    return cls.parse({"name": stem, **read_yaml(path)}, path)
