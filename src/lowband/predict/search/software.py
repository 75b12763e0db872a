"""Which software runs what a plan finds: a row each, by what its options can say.

Sources: Megatron-LM's arguments (`megatron/training/arguments.py`: a distributed optimizer shards its states
over data ranks; virtual stages need micro-batches in multiples of the pipeline's ranks; the ends of a
pipeline may have a layer less); DeepSpeed's configuration (ZeRO stages, `zero_hpz_partition_size`,
`zero_quantized_weights`, `zero_quantized_gradients`, MiCS; its pipeline engine takes ZeRO up to stage 1);
torchtitan's job configuration (dp_shard x dp_replicate, its pipelines' schedules, selective recomputation by
operator).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from lowband.cost.activations import Recompute
from lowband.predict.workload import Workload
from lowband.spec.mesh import SELF, WORLD
from lowband.spec.model import ModelSpec
from lowband.spec.schedules import Name
from lowband.spec.scheme import Scheme
from lowband.spec.stack import Stack
from lowband.spec.step import STEP

WIRES = tuple(row.name for row in STEP if row.coded)
ANY = "any"


@dataclass(frozen=True)
class Software:
    """One row.

    stacks:    those whose constants are its own
    places:    whether it places states so
    schedules: of a pipeline, and of accumulation; 1f1b is both
    recompute: what it keeps
    axes:      names of those that it has beside data
    whole:     whether virtual stages need whole rounds of micro-batches, one per rank along pipeline
    adapters:  whether it trains modules as PEFT makes them
    """

    name: str
    stacks: tuple[str, ...]
    places: Callable[[Scheme, Workload], bool]
    schedules: frozenset[Name]
    recompute: frozenset[Recompute]
    axes: frozenset[str] = frozenset({"tensor", "context", "expert", "pipeline"})
    whole: bool = False
    adapters: bool = False

    def runs(self, job: Workload, scheme: Scheme | None = None) -> bool:
        """Whether it runs the job, in at least one of its numbers of micro-batches. scheme: instead of its"""
        return self.computes(job) and self.places(scheme or job.scheme, job)

    def computes(self, job: Workload) -> bool:
        """Whether it has the job's axes, schedule and recomputation."""
        apart = {name for name in ("tensor", "context", "expert", "pipeline") if getattr(job.axes, name) > 1}
        return (
            apart <= self.axes
            and (job.lora is None or self.adapters)
            and job.axes.row in self.schedules
            and job.recompute in self.recompute
            and bool(np.any(self.takes(job)))
        )

    def takes(self, job: Workload) -> NDArray[np.bool_]:
        """Of each number of micro-batches, whether it runs that many."""
        many = np.asarray(job.accumulation)
        rounds = self.whole and job.axes.chunks > 1
        return many % job.axes.pipeline == 0 if rounds else many > 0


def _is_exact(scheme: Scheme) -> bool:
    return all(scheme.wire(name) == "native" for name in WIRES)


def _of_megatron(s: Scheme, job: Workload) -> bool:
    return _is_exact(s) and s.secondary is None and (s.weights, s.grads) == (SELF, SELF)


def _of_deepspeed(s: Scheme, job: Workload) -> bool:
    wires = {name: s.wire(name) for name in WIRES}
    if job.is_in_stages:
        return _of_megatron(s, job)
    if s.weights == WORLD:  # ZeRO-3, with the weights of a node once more where ZeRO++ gathers them there
        gathers = wires["forward_gather"], wires["backward_gather"]
        quantized = gathers in (("native", "native"), ("int8", "int8")) or (
            s.secondary is not None and gathers == ("int8", "native")
        )
        return s.grads == WORLD and quantized and wires["boundary_reduce"] == "native"
    if s.weights != SELF:  # MiCS
        return _is_exact(s) and s.secondary is None and s.weights == s.grads == s.optim
    return _is_exact(s) and (s.grads, s.optim) in ((SELF, SELF), (SELF, WORLD), (WORLD, WORLD))


def _of_fsdp(s: Scheme, job: Workload) -> bool:
    if not _is_exact(s) or s.optim == SELF:
        return _is_exact(s) and s.secondary is None
    if job.is_in_stages:  # weights stay gathered, and gradients whole, between micro-batches
        return s.secondary is None and s.weights == s.grads == SELF
    is_kept = s.secondary is None and s.weights == SELF and s.grads == s.optim
    return is_kept or s.weights == s.grads == s.optim


def _of_ours(s: Scheme, job: Workload) -> bool:
    return job.model.is_gpt or job.lora is not None  # examples/lora.py


_ALL_SCHEDULES: Final[frozenset[Name]] = frozenset(
    {"1f1b", "interleaved", "breadth", "zb-h1", "zb-h2", "zb-v", "dualpipe-v"}
)
_MEGATRON_LM: Final[frozenset[Name]] = frozenset({"1f1b", "interleaved"})
_TORCHTITAN: Final[frozenset[Name]] = frozenset({"1f1b", "interleaved", "zb-v", "dualpipe-v"})

OURS: Final = Software(
    "lowband", ("ours",), _of_ours, _ALL_SCHEDULES, frozenset({"none", "full", "host"}), adapters=True,
)  # fmt: skip
SOFTWARE: Final = (
    Software(
        "megatron-lm", ("megatron-lm", "megatron-lm-2021"), _of_megatron, _MEGATRON_LM,
        frozenset({"none", "selective", "full"}), whole=True,
    ),
    Software(
        "deepspeed", ("deepspeed-zero",), _of_deepspeed, frozenset({"1f1b"}), frozenset({"none", "full"}),
        adapters=True,
    ),
    Software(
        "torchtitan", ("fsdp2", "fsdp2-2025"), _of_fsdp, _TORCHTITAN, frozenset({"none", "op", "full"}),
    ),
    Software(
        "llm-foundry", ("fsdp",), _of_fsdp, frozenset({"1f1b"}), frozenset({"none", "full"}), frozenset(),
    ),
    OURS,
)  # fmt: skip


def of_stack(stack: Stack, model: ModelSpec, names: Sequence[str] | None = None) -> tuple[Software, ...]:
    """What runs a plan on the stack: its own software, and our engine, whose rows stand on its constants.

    names: of others, or `any`. Of a stack that no row names nothing is known, and of a model that
    our engine does not train none is left on its own stack: ().
    """
    if names is not None:
        return () if ANY in names else tuple(row for row in SOFTWARE if row.name in names)
    own = [row for row in SOFTWARE if stack.name in row.stacks]
    return tuple(row for row in dict.fromkeys((*own, OURS)) if row is not OURS or model.is_gpt) if own else ()


def runners(job: Workload) -> tuple[str, ...]:
    """Names of the software that runs a job. job: one point"""
    return tuple(row.name for row in SOFTWARE if row.runs(job))
