"""The files that a job writes into its run folder: one schema, writer and reader side by side.

    env.json      Environment   once, before the first step
    steps.jsonl   StepRecord    one line per optimizer step, full precision
    outcome.json  Outcome       once, at the end, also if the run failed
    run.lock      lock.hold     the process that runs it, or ran it last

Stored values are base units: seconds, bytes.
"""

from collections.abc import Iterable, Mapping
from typing import Any, Literal

from pydantic import ConfigDict, Field

from lowband.spec.mesh import SELF
from lowband.spec.yaml_model import Strict

# Incremented when the way of measuring changes, so that rows measured differently are never mixed unnoticed.
MEASUREMENT_VERSION = 1

CONTROL = "control"  # collective of norms and flags, which belong to no state

Status = Literal["ok", "oom", "timeout", "nan", "overloaded", "error", "not run"]


class Sent(Strict):
    """Bytes sent over one level's links for one purpose: by one rank, or as a mean over ranks."""

    level: str
    collective: str
    wire: str
    bytes: int | float


SentRow = tuple[str, str, str]  # level, collective, wire


def by_row(sent: Iterable[Sent]) -> dict[SentRow, int | float]:
    """The bytes of each row."""
    return {(one.level, one.collective, one.wire): one.bytes for one in sent}


def of_rows(counts: Mapping[SentRow, int | float]) -> tuple[Sent, ...]:
    """What has these bytes, in the order of the rows."""
    return tuple(
        Sent(level=level, collective=collective, wire=wire, bytes=count)
        for (level, collective, wire), count in counts.items()
    )


def mean(total: int, ranks: int) -> int | float:
    """total / ranks, an int where it is whole. Equal quotients give equal results."""
    return total / ranks if total % ranks else total // ranks


class Slowest(Strict):
    """The slowest of several alike in one step: ranks in computing, or of a level's messages those of a rank
    or of a pair.
    """

    level: str = Field(description="self: computing; else whose links the messages take")
    ranks: tuple[int, ...] = Field(description="one rank, with all its messages of the level; or a pair")
    seconds: float = Field(description="a pair: of the end that waited less; a rank: its fastest pair")
    median_s: float = Field(description="the lower median of all that were compared")
    compared: int

    @property
    def times(self) -> float:
        """How often the median it took."""
        return self.seconds / self.median_s if self.median_s > 0 else 1.0


class Slow(Strict):
    """A rank or a link that was slow in many steps (`lowband.run.slow` has the rule)."""

    level: str = Field(description="as of Slowest; several are joined by ' and '")
    ranks: tuple[int, ...]
    times: float = Field(description="how often the median it took, in the median of those steps")
    compared: int
    steps: int
    of_steps: int

    def __str__(self) -> str:
        """One line for the user."""
        found = f"{self.times:.1f} times as long as the median of {self.compared}"
        when = f"in {self.steps} of {self.of_steps} steps"
        if self.level == SELF:
            return f"rank {self.ranks[0]} computes {found} ranks {when}"
        if len(self.ranks) == 1:
            whose = f"of rank {self.ranks[0]} with each other rank"
        else:
            whose = f"between ranks {self.ranks[0]} and {self.ranks[1]}"
        return f"the messages {whose} (level {self.level}) take {found} {when}"


class StepRecord(Strict):
    """One optimizer step. Times are the maximum over ranks; loss is the mean over the global batch."""

    model_config = ConfigDict(allow_inf_nan=True)  # a loss that overflowed is a record, not bad input

    step: int
    step_time_s: float
    compute_time_s: float | None = Field(
        description="step_time_s less exposed_comm_time_s, of the slowest rank"
    )
    exposed_comm_time_s: float | None = Field(
        description="waiting for communication; null for a peer's engine"
    )
    hidden_comm_time_s: float | None = Field(
        description="collectives behind the computation, with their copies, sums and quantization; "
        "null for a peer's engine"
    )
    exposed_sync_time_s: float | None = Field(
        default=None,
        description="part of exposed_comm_time_s: waiting for exchanges between replicas; null without sync",
    )
    tokens: int
    loss: float
    grad_norm: float = Field(description="of replicas that meet seldom: the largest")
    sent: tuple[Sent, ...] = Field(
        description="mean over ranks; they send the same, but in a flat ring not over the same level's links"
    )
    real_share: float | None = Field(
        default=None, description="where computation is paced: real over paced time, the most of all ranks"
    )
    slowest: tuple[Slowest, ...] = Field(
        default=(), description="empty for a peer's engine; of messages: on gloo only, not of rings"
    )
    interface_bytes: int | None = Field(
        default=None, description="in a box: what rank 0's interface has sent since the step before"
    )


class StateBytes(Strict):
    """Peak bytes of one kind on one rank."""

    kind: str
    bytes: int


class Outcome(Strict):
    """How a run ended. `cause` is one line, empty when the status is ok."""

    status: Status
    cause: str = ""
    steps: int = Field(description="optimizer steps completed")
    wall_s: float = Field(
        default=0.0, description="from the start of the run, imports excluded, to its outcome"
    )
    resumed_from: int = Field(
        default=0, description="the step whose checkpoint the last attempt started from"
    )
    begins: tuple[int, ...] = Field(
        default=(), description="the steps after which attempts began whose steps are kept"
    )
    of: str = Field(default="", description="`RunSpec.training_sum` of the spec that was trained")
    checkpoint_stall_s: float = Field(
        default=0.0, description="longest time that a checkpoint blocked the training"
    )
    measurement_version: int = MEASUREMENT_VERSION
    peak_memory_bytes_max: int = Field(
        default=0, description="of the process (CPU) or the device, over ranks"
    )
    peak_memory_bytes_min: int = 0
    peak_reserved_bytes_max: int | None = Field(
        default=None, description="of the device's allocator, fragments included, over ranks"
    )
    sent: tuple[Sent, ...] = Field(
        default=(),
        description="in the last step, mean over ranks; where replicas meet seldom, over the last period too",
    )
    outside: tuple[Sent, ...] = Field(
        default=(), description="of rank 0 in the last warm-up step, counted from outside of the engine"
    )
    states: tuple[StateBytes, ...] = Field(default=(), description="of the rank that holds most")
    interface_bytes: int | None = Field(
        default=None,
        description="in a box: bytes that rank 0's interface sent in all steps, by the kernel's counter",
    )
    consensus_distance: float | None = Field(
        default=None,
        description="of replicas that never agree, after the last step: root mean square of their distance "
        "from their mean",
    )
    slow: tuple[Slow, ...] = Field(
        default=(), description="ranks and links that were slow in the last steps of the last attempt"
    )
    notes: str = Field(default="", description="remarks for a reader of the run: `shimmed`")
    weights_sha256: str = Field(
        default="", description="of names and sums of the final fp32 weights; empty if not asked for"
    )


class Environment(Strict):
    """Host, hardware and software versions of a run."""

    commit: str
    dirty: bool
    hosts: tuple[str, ...]
    device: str
    backend: str = Field(default="gloo", description="of torch.distributed; fake: nothing is computed")
    versions: dict[str, str]
    variables: dict[str, str]
    data: dict[str, Any] = Field(description="what was read: source, bytes, sha256, split")
    links: str = Field(
        default="", description="how ranks were joined: shaped, or why not, or the machine's own"
    )
