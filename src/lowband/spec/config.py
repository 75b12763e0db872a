"""The one reader of config/ and of the cluster files: models, schemes, machines, stacks, jobs, suites."""

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

from lowband.errors import UserError
from lowband.spec.huggingface import model_of_config
from lowband.spec.job import SlurmRequest
from lowband.spec.machine import Machine
from lowband.spec.model import ModelSpec
from lowband.spec.plain_data import read_yaml
from lowband.spec.run import RunSpec
from lowband.spec.scheme import Scheme
from lowband.spec.stack import OURS, Stack
from lowband.spec.suites import Suite, expand
from lowband.spec.yaml_model import Strict, parse_entry

T = TypeVar("T", bound=Strict)

IN_CHECKOUT = "in the root of a checkout, its names"  # where a folder with suites or sites is not found
BUILT_IN = Path(__file__).parents[1] / "builtin"  # config/ and slurm/: links here, copies in a wheel


class Config:
    """The configuration under `root`, the folder that holds config/ and slurm/.

    A model, scheme, stack or cluster that `root` does not have is the built-in one of that name. There are no
    built-in suites. A model or a scheme is an entry of its file, or a file of its own in the folder of that
    name (config/schemes/<name>.yaml), as `lowband plan --write` makes them. A file is read on first use and
    then kept; a file that changes later needs a new Config.
    An unknown name raises UserError with the file or folder and the allowed names.
    """

    def __init__(self, root: Path = Path()) -> None:
        self.root = root
        self.models_file = root / "config" / "models.yaml"
        self.schemes_file = root / "config" / "schemes.yaml"
        self.models_folder = root / "config" / "models"
        self.schemes_folder = root / "config" / "schemes"
        self.suites_folder = root / "config" / "suites"
        self.stacks_folder = root / "config" / "stacks"
        self.clusters_folder = root / "slurm"
        self._read = cache(read_yaml)
        self._entry = cache(self._read_entry)

    @property
    def models(self) -> list[str]:
        return self._entries_of(self.models_file)

    @property
    def schemes(self) -> list[str]:
        return self._entries_of(self.schemes_file)

    @property
    def clusters(self) -> list[str]:
        folders = self.clusters_folder, self._built_in(self.clusters_folder)
        return sorted({path.parent.name for folder in folders for path in folder.glob("*/machine.yaml")})

    @property
    def stacks(self) -> list[str]:
        folders = self.stacks_folder, self._built_in(self.stacks_folder)
        return [OURS.name, *sorted({path.stem for folder in folders for path in folder.glob("*.yaml")})]

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
        names = values["suites"]
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            raise UserError("suites is not a list of names", where=path, allowed="names in config/suites/")
        return names

    def model(self, name: str) -> ModelSpec:
        model: ModelSpec = self._entry(ModelSpec, self.models_file, name)
        return model

    def scheme(self, name: str) -> Scheme:
        scheme: Scheme = self._entry(Scheme, self.schemes_file, name)
        return scheme

    def machine(self, cluster: str) -> Machine:
        """The machine of `slurm/<cluster>/machine.yaml`, completed by the machines that it is `like`."""
        path = self._machine_file(cluster)
        if not path.exists():
            raise self._no_cluster(cluster)
        values = {key: value for key, value in self._read(path).items() if key != "like"}
        for like in self._alike(cluster)[1:2]:
            values = self.machine(like).model_dump(exclude_none=True) | values
        return Machine.parse(values | {"name": cluster}, path)

    def machine_for(self, scheme: Scheme, preferred: str) -> Machine | None:
        """A machine that has the levels which the scheme names; None if no cluster's has.

        preferred: the cluster that is taken if its machine has them; else the one with the smallest nodes,
                   because it is to be drawn
        """
        needed = scheme.machine_levels
        first = self.machine(preferred)
        if needed <= set(first.sizes):
            return first
        able = [machine for machine in map(self.machine, self.clusters) if needed <= set(machine.sizes)]
        return min(able, key=lambda machine: machine.node_size, default=None)

    def stack_on(self, name: str, cluster: str) -> Stack:
        """The stack of `config/stacks/<name>.yaml`, with its constants on a cluster or its like."""
        if name == OURS.name:
            return OURS
        if not (_is_name(name) and (path := self._stack_file(name)).is_file()):
            raise UserError(f"no stack '{name}'", where=self.stacks_folder, allowed=self.stacks)
        stack, alike = Stack.parse({**self._read(path), "name": name}, path), self._alike(cluster)
        found, there = stack.on(alike), next((name for name in alike if name in stack.at), cluster)
        if there == cluster or self.machine(there).device == self.machine(cluster).device:
            return found
        # How far predictions were off with one device's shares of its peaks says nothing of another's.
        return found.model_copy(update={"error_factor": None})

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
        if not _is_name(name) or not path.is_file():
            raise UserError(
                f"no suite '{name}'", where=self.suites_folder, allowed=self.suites or IN_CHECKOUT
            )
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
        """The model of a name, of a file with one model's keys, or of a Hugging Face config.json."""
        if Path(given).suffix == ".json":
            return model_of_config(Path(given))
        return _own_file(ModelSpec, given) or self.model(given)

    def given_scheme(self, given: str) -> Scheme:
        """The scheme of a name, or of a file with one scheme's keys."""
        return _own_file(Scheme, given) or self.scheme(given)

    def given_machine(self, given: str) -> Machine:
        """The machine of a cluster's name, or of a machine file."""
        return _own_file(Machine, given) or self.machine(given)

    def given_stack(self, given: str | None, machine: Machine) -> Stack:
        """The stack of a name or of a stack file, on the machine. given: None: the one that it names."""
        own = None if given is None else _own_file(Stack, given)
        if own is not None:
            return own.on(self._alike(machine.name))
        return self.stack_on(given or machine.stack, machine.name)

    def _built_in(self, path: Path) -> Path:
        return BUILT_IN / path.relative_to(self.root)

    def _own_or_built_in(self, path: Path) -> Path:
        return path if path.exists() else self._built_in(path)

    def _no_cluster(self, name: str) -> UserError:
        return UserError(f"no cluster '{name}'", where=self.clusters_folder, allowed=self.clusters)

    def _stack_file(self, name: str) -> Path:
        return self._own_or_built_in(self.stacks_folder / f"{name}.yaml")

    def _machine_file(self, cluster: str) -> Path:
        if not _is_name(cluster):
            raise self._no_cluster(cluster)
        return self._own_or_built_in(self.clusters_folder / cluster / "machine.yaml")

    def _alike(self, cluster: str) -> list[str]:
        """The cluster and those that it is like, each like the next."""
        names = [cluster]
        while (path := self._machine_file(names[-1])).exists() and "like" in self._read(path):
            like = self._read(path)["like"]
            if not isinstance(like, str) or not _is_name(like):
                raise UserError(f"like: {like!r} is not a cluster's name", where=path, allowed=self.clusters)
            names.append(like)
            if names[-1] in names[:-1]:
                raise UserError(f"like: {' -> '.join(names)} is circular", where=path)
        return names

    def _job_file(self, cluster: str) -> Path:
        return self._machine_file(cluster).with_name("job.yaml")

    def _suite_file(self, name: str) -> Path:
        return self.suites_folder / f"{name}.yaml"

    def _entries_of(self, file: Path) -> list[str]:
        """The names of built-in entries, of those in the file, in its order, and of files of their own."""
        own = self._read(file) if file.exists() else {}
        alone = sorted(path.stem for path in file.with_suffix("").glob("*.yaml"))
        return list(dict.fromkeys([*self._read(self._built_in(file)), *own, *alone]))

    def _read_entry(self, cls: type[Strict], file: Path, name: str) -> Any:
        alone = file.with_suffix("") / f"{name}.yaml"
        if _is_name(name) and alone.is_file():
            if file.exists() and name in self._read(file):
                raise UserError(f"'{name}' is also an entry of {file}", where=alone)
            return cls.parse({"name": name, **_one_entry(self._read(alone), name)}, alone)
        for path in (file, self._built_in(file)):
            if path.exists() and name in (entries := self._read(path)):
                return parse_entry(cls, entries[name], f"{path}: {name}", name=name)
        raise UserError(f"no entry '{name}'", where=file, allowed=sorted(self._entries_of(file)))


def _is_name(text: str) -> bool:
    """Whether a file in one of the folders may have this name."""
    return 0 < len(text) <= 100 and text.isprintable() and "/" not in text and text not in (".", "..")


def _own_file(cls: type[T], given: str) -> T | None:
    path = Path(given)
    if path.suffix not in (".yaml", ".yml"):
        return None
    stem = path.parent.name if path.name == "machine.yaml" else path.stem
    return cls.parse({"name": stem, **_one_entry(read_yaml(path), stem)}, path)


def _one_entry(values: dict[str, Any], name: str) -> dict[str, Any]:
    """The keys of an entry in a file of its own, which may stand below its name, as in a file of several."""
    inside = values.get(name)
    return inside if len(values) == 1 and isinstance(inside, dict) else values
