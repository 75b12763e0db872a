"""A case: modules, placements, levels and a training program, as printable data.

`tests.random.draw.case` makes one from a seed; `sharded` and `reference` run it. A program is a tuple of
actions that every rank performs in the same order, as users' loops do.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from lowband.spec.mesh import Levels
from lowband.spec.scheme import Scheme
from lowband.spec.step import Pattern
from lowband.spec.sync import Sync

Kind = Literal["mlp", "norm", "scale", "branch", "aux"]
Checkpoint = Literal["none", "reentrant", "plain"]
Frozen = Literal["none", "some", "all"]


@dataclass(frozen=True)
class Part:
    """One place in a net's chain."""

    kind: Kind
    width: int  # inner features of an mlp or a branch
    wrapped: bool  # a unit of its own
    nested: bool  # the two sides of a branch are units of their own too
    checkpoint: Checkpoint
    residual: bool
    frozen: Frozen
    shares: (
        int | None
    )  # calls the module of this earlier place; everything but `residual` is then that place's
    tied: int | None  # its first weight is that of the mlp at this earlier place


@dataclass(frozen=True)
class Net:
    """A sharded module: an optional stem that belongs to the root, then a chain of parts."""

    features: int
    stem: Literal["none", "trained", "frozen"]
    parts: tuple[Part, ...]
    returns: Literal["tensor", "dict", "loss"]
    scheme: Scheme
    checkpoint: Checkpoint  # of the call of the whole net


@dataclass(frozen=True)
class Forward:
    """Start a micro-batch. `number` is unique in the program and gives the input."""

    number: int
    skipped: tuple[int, ...]  # places of the last net that this forward leaves out, on all ranks


@dataclass(frozen=True)
class Backward:
    """One backward of the sum of the losses of micro-batches."""

    numbers: tuple[int, ...]
    sync: bool
    keep: bool = False  # retain the graph: another backward of it follows


@dataclass(frozen=True)
class Accumulate:
    """Forwards and backwards of micro-batches breadth-first, by `lowband.accumulate`."""

    numbers: tuple[int, ...]
    sync: bool


@dataclass(frozen=True)
class LostForward:
    """A forward that never sees its backward."""

    number: int
    mode: Literal["train", "no_grad", "inference"]


@dataclass(frozen=True)
class BrokenForward:
    """A forward that raises at a place of a net; the caller catches it."""

    number: int
    net: int
    place: int
    mode: Literal["train", "no_grad"]


@dataclass(frozen=True)
class BrokenBackward:
    """A backward that raises at a place of a net, in its gradients or in a checkpointed layer's second run.

    It does not raise where no gradient flows, or nothing is recomputed. The program goes on with a `Zero`.
    """

    number: int
    net: int
    place: int
    where: Literal["backward", "recompute"]


@dataclass(frozen=True)
class State:
    """The whole state of every net."""


@dataclass(frozen=True)
class Clip:
    """Clip every net's gradients by its own norm."""

    max_norm: float


@dataclass(frozen=True)
class Step:
    """Steps of some of the optimizers."""

    optimizers: tuple[int, ...]


@dataclass(frozen=True)
class Zero:
    """Clear the gradients: by the optimizers, set to None or to zero, or by the modules."""

    how: Literal["none", "zeros", "modules"]


Pass = Forward | Backward | Accumulate | LostForward | BrokenForward | BrokenBackward
Action = Pass | State | Clip | Step | Zero


@dataclass(frozen=True)
class Case:
    """Everything that a run depends on."""

    seed: int
    features: tuple[str, ...]  # what the generator chose to have, for the table
    ranks: int
    inner: tuple[tuple[str, int], ...]
    nets: tuple[Net, ...]  # the first one's output is the second one's input
    again: bool  # the first one runs twice: its output is its input once more
    own_topologies: bool  # of each net
    compute_dtype: Literal["fp32", "bf16"]
    reduce_dtype: Literal["fp32", "bf16"]
    overlap: bool
    optimizers: tuple[str, ...]  # parameters are dealt out to them in turn; to muon the first net's matrices
    over: str | None  # the level that these are dealt out over to ranks
    program: tuple[Action, ...]
    collectives: Pattern
    slow: Literal["nothing", "lane", "computation"]  # what sleeps at random, on the odd ranks

    @property
    def levels(self) -> Levels:
        return Levels.fit(dict(self.inner), self.ranks)

    @property
    def is_exact(self) -> bool:
        """Whether the order of all sums is known."""
        outer = [net.checkpoint for net in self.nets]
        return self.collectives != "flat" and not gets_gradients_in_pieces(
            [net.parts for net in self.nets], outer, self.again, self.program
        )

    @property
    def is_plain(self) -> bool:
        """Whether each step's bytes have a closed form: every unit trains, once in each micro-batch."""
        return "plain" in self.features

    @property
    def sync(self) -> Sync | None:
        """How replicas meet, if there are any."""
        return self.nets[0].scheme.sync

    def is_seen(self, broken: BrokenBackward) -> bool:
        """Whether ranks must raise where one process does.

        Torch ends the second run of a checkpointed layer as soon as it has what the backward needs. Frozen
        layers need their weights, which the engine hands out itself, so there it may end before the place.
        """
        part = self.nets[broken.net].parts[broken.place]
        part = part if part.shares is None else self.nets[broken.net].parts[part.shares]
        is_short = part.checkpoint == "plain" and part.frozen != "none"
        return broken.where != "recompute" or not is_short

    @property
    def has_matrices(self) -> bool:
        """Whether the first optimizer updates whole matrices."""
        return self.optimizers[0] == "muon"

    @property
    def accumulation(self) -> int:
        """Passes over the units in each step, of a plain case."""
        backward = sum(isinstance(action, Backward | Accumulate) for action in self.program)
        return backward // sum(isinstance(action, Step) for action in self.program)


def gets_gradients_in_pieces(
    chains: Sequence[tuple[Part, ...]], outer: Sequence[Checkpoint], again: bool, program: tuple[Action, ...]
) -> bool:
    """Whether some weight may get its gradient of one backward in pieces.

    Under reentrant checkpointing a weight that is used in several places does. The engine may reduce the
    pieces one by one and add them afterwards.
    """
    parts = [part for chain in chains for part in chain]
    is_used_again = again or any(part.shares is not None or part.tied is not None for part in parts)
    is_summed = any(isinstance(action, Backward) and len(action.numbers) > 1 for action in program)
    return (is_used_again or is_summed) and "reentrant" in (*outer, *(part.checkpoint for part in parts))
