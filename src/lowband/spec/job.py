"""How to request a run's nodes from a cluster's Slurm: `slurm/<cluster>/job.yaml`, beside machine.yaml.

It is not part of a run's spec: a run does not change when a queue does.
"""

import math
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from pydantic import Field, PositiveInt, field_validator

from lowband.errors import UserError
from lowband.spec.machine import Machine
from lowband.spec.run import RunSpec
from lowband.spec.yaml_model import Strict

ACCOUNT, PARTITION, QOS = "SLURM_PROJECT", "SLURM_PART", "SLURM_QOS"  # what a user sets for a command

# What no name has, and what has to be there instead: the executor would take two words for two accounts.
_NEVER_IN = {ACCOUNT: r"[\s,]", PARTITION: r"\s", QOS: r"\s"}
_ONE = {ACCOUNT: "the name of one project", PARTITION: "a partition, or several with commas", QOS: "a QOS"}

# Options that are given elsewhere, by their names and letters: Snakemake's executor refuses them among the
# further options of sbatch, but only when it submits.
_RANKS = "the suite's ranks decide it"
_TIME = "the suite's time_limit_s and spare_minutes decide it"
_SUBMITTER = "who submits the job sets it"
_MEMORY = "jobs have whole nodes"
_ELSEWHERE = {
    "account": f"set {ACCOUNT}", "A": f"set {ACCOUNT}",
    "partition": "use the key partition", "p": "use the key partition",
    "qos": "use the key qos", "q": "use the key qos",
    "constraint": "use the key constraint", "C": "use the key constraint",
    **dict.fromkeys(("cpus-per-task", "c", "cpus-per-gpu"), "use the key cpus_per_rank"),
    **dict.fromkeys(("nodes", "N", "ntasks", "n", "ntasks-per-node", "ntasks-per-gpu"), _RANKS),
    **dict.fromkeys(("time", "t"), _TIME),
    **dict.fromkeys(("mem", "mem-per-cpu"), _MEMORY),
    **dict.fromkeys(("gres", "gpus", "G"), "use --gpus-per-node"),
    **dict.fromkeys(("clusters", "M"), "a folder of slurm/ is one cluster"),
    **dict.fromkeys(("job-name", "J", "output", "o", "error", "e", "comment", "parsable"), _SUBMITTER),
    **dict.fromkeys(("workdir", "chdir", "D", "export"), _SUBMITTER),
}  # fmt: skip
_BY_LAUNCHER = dict.fromkeys(
    ("nodes", "N", "ntasks-per-node", "ntasks", "n", "distribution", "m", "kill-on-bad-exit", "K"),
    "slurm/launch.sh sets it",
)


@dataclass(frozen=True)
class Allocation:
    """Runs on as many nodes that share a job, one after the other.

    limits_minutes: of a job in which every run takes its whole time limit
    minutes:        that are asked for: at most the queue's limit; what is left then is for the next job
    """

    name: str
    nodes: int
    runs: tuple[RunSpec, ...]
    limits_minutes: int
    minutes: int


class SlurmRequest(Strict):
    """What every run on a cluster requests from Slurm. Runs take whole nodes."""

    tasks: Literal["rank", "node"] = Field(
        description="what srun starts: each rank, or on each node a launcher that forks the node's ranks"
    )
    job_of: Literal["run", "nodes"] = Field(
        default="run",
        description="run: each run is a job; nodes: runs on as many nodes share one, one after the other",
    )
    cpus_per_rank: PositiveInt
    account: bool = Field(
        default=True, description=f"whether jobs need a project's name, sbatch --account: ${ACCOUNT}"
    )
    partition: str = Field(default="", description=f"sbatch --partition, unless ${PARTITION} names another")
    qos: str = Field(default="", description=f"sbatch --qos, unless ${QOS} names another")
    constraint: str = Field(default="", description="sbatch --constraint")
    sbatch: str = Field(default="", description="further options of sbatch")
    srun: str = Field(default="", description="further options of srun")
    spare_minutes: int = Field(
        ge=2,
        default=2,
        description="added to the run's own time limit: start, imports, recording the outcome",
    )
    longest_minutes: dict[PositiveInt, PositiveInt] = Field(
        default={}, description="queue limits: up to this many nodes, at most this many minutes"
    )

    @field_validator("sbatch")
    @classmethod
    def _no_other_place(cls, text: str) -> str:
        return _without(text, _ELSEWHERE)

    @field_validator("srun")
    @classmethod
    def _not_the_launchers(cls, text: str) -> str:
        return _without(text, _BY_LAUNCHER)

    def queue(self, variables: Mapping[str, str]) -> dict[str, str]:
        """Whose jobs they are and where they wait, as Snakemake resources; what is not given is left out.

        variables: the environment, of which SLURM_PROJECT, SLURM_PART and SLURM_QOS are read
        Raises UserError for one of these that is no name.
        """
        for name, never in _NEVER_IN.items():
            if re.search(never, variables.get(name, "")):
                raise UserError(f"{variables[name]!r} is no name", where=name, allowed=_ONE[name])
        found = {
            "slurm_account": variables.get(ACCOUNT, "") if self.account else "",
            "slurm_partition": variables.get(PARTITION) or self.partition,
            "qos": variables.get(QOS) or self.qos,
        }
        return {name: value for name, value in found.items() if value}

    def resources(self, spec: RunSpec) -> dict[str, str | int]:
        """Snakemake resources of a run, as its Slurm executor understands them.

        Raises UserError if the run is too large or too long for the cluster's queues.
        """
        per_node = spec.machine.node_size
        nodes = math.ceil(_processes(spec) / per_node)
        minutes = math.ceil(spec.time_limit_s / 60) + self.spare_minutes
        return {
            "nodes": nodes,
            "cpus_per_task": self.cpus_per_rank,
            "runtime": self._within_queue(spec, nodes, minutes),
            "constraint": self.constraint,
            **self._of_a_node(spec.machine),
        }

    def of_one_node(self, machine: Machine, minutes: int) -> dict[str, str | int]:
        """Snakemake resources of a job that is no run: one node, for so many minutes at most."""
        asked = {
            "nodes": 1,
            "cpus_per_task": self.cpus_per_rank,
            "runtime": minutes + self.spare_minutes,
            "constraint": self.constraint,
            **self._of_a_node(machine),
        }
        return {name: value for name, value in asked.items() if value}

    def allocations(self, specs: Sequence[RunSpec]) -> list[Allocation]:
        """The jobs that runs share, fewest nodes first. Where each run is a job, as counts always are: none.

        Raises UserError, as `resources` does, for a run that no queue takes.
        """
        if self.job_of == "run":
            return []
        shared: dict[int, list[RunSpec]] = {}
        for spec in specs:
            if spec.device != "fake":
                shared.setdefault(int(self.resources(spec)["nodes"]), []).append(spec)
        return [self._shared(runs) for _, runs in sorted(shared.items())]

    def _of_a_node(self, machine: Machine) -> dict[str, str | int]:
        """A task for each rank that fits a node, also where srun starts one.

        Snakemake submits no job of one task a node: it is told two, and sbatch takes the last of equal ones.
        """
        one = ["--ntasks-per-node=1"] if machine.node_size == 1 else []
        further = " ".join([*filter(None, [self.sbatch.strip()]), *one])
        return {"tasks_per_node": max(machine.node_size, 2), "slurm_extra": further}

    def _shared(self, runs: Sequence[RunSpec]) -> Allocation:
        nodes = int(self.resources(runs[0])["nodes"])
        minutes = sum(math.ceil(spec.time_limit_s / 60) for spec in runs) + self.spare_minutes
        at_most = min([minutes, *self._limits(nodes)[:1]])
        return Allocation(f"{runs[0].machine.name}_{nodes}_nodes", nodes, tuple(runs), minutes, at_most)

    def tasks_per_node(self, spec: RunSpec) -> int:
        """Number of tasks that srun starts on each node."""
        return 1 if self.tasks == "node" else min(_processes(spec), spec.machine.node_size)

    def _limits(self, nodes: int) -> list[int]:
        """Longest minutes of the queues that take so many nodes, the smallest queue first."""
        return [limit for most, limit in sorted(self.longest_minutes.items()) if nodes <= most]

    def _within_queue(self, spec: RunSpec, nodes: int, minutes: int) -> int:
        if not self.longest_minutes:
            return minutes
        limits = self._limits(nodes)
        if not limits:
            raise UserError(
                f"{nodes} nodes",
                where=f"{spec.run_id}: ranks",
                allowed=f"{max(self.longest_minutes)} at most, longest_minutes of job.yaml",
            )
        if minutes > limits[0]:
            raise UserError(
                f"{minutes} minutes on {nodes} nodes",
                where=f"{spec.run_id}: time_limit_s",
                allowed=f"{limits[0]} minutes at most, longest_minutes of job.yaml",
            )
        return minutes


def _without(options: str, elsewhere: Mapping[str, str]) -> str:
    """The options, of which none is given elsewhere. Raises ValueError for the first that is."""
    for word in shlex.split(options):
        name = word[2:].partition("=")[0] if word.startswith("--") else word[1:2] if word[:1] == "-" else ""
        if name in elsewhere:
            raise ValueError(f"no place for {word.partition('=')[0]}: {elsewhere[name]}")
    return options


def _processes(spec: RunSpec) -> int:
    """Processes of a run. A count on fake tensors takes one, whatever number of ranks it counts for."""
    return 1 if spec.device == "fake" else spec.ranks
