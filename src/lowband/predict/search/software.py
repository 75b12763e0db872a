"""Which software runs what a plan finds: a row each, by what its options can say.

Sources: Megatron-LM's arguments (`megatron/training/arguments.py`: a distributed optimizer shards its states
over data ranks; virtual stages need micro-batches in multiples of the pipeline's ranks; the ends of a
pipeline may have a layer less); DeepSpeed's configuration (ZeRO stages, `zero_hpz_partition_size`,
`zero_quantized_weights`, `zero_quantized_gradients`, MiCS; its pipeline engine takes ZeRO up to stage 1);
torchtitan's job configuration (dp_shard x dp_replicate, its pipelines' schedules, selective recomputation by
operator).

Of some layers' recomputation: Megatron-LM's `--recompute-method block` is about the first
`--recompute-num-layers` of each stage; torchtitan's `selective_ac_option` may be a number n, of every n-th
layer that a process builds; llm-foundry's `activation_checkpointing_target` names any blocks; our
`recompute_layers` is Megatron-LM's. Of states on the host: Megatron-LM's `--optimizer-cpu-offload`, which
needs its distributed optimizer, with `--optimizer-offload-fraction`; DeepSpeed's `offload_optimizer`, and in
stage 3 its `ratio`, its `nvme` and `offload_param`; torchtitan's `enable_cpu_offload`, of weights and all;
ours in the scheme.

Of attention along context: Megatron-LM's `--cp-comm-type` has all ways, and `a2a+p2p` for two; that of
DeepSpeed-Ulysses is by heads; torchtitan's `context_parallel_rotate_method` is torch's, `alltoall` for a ring
or `allgather`.

Of tokens to experts: all-to-alls of all rows, `flat`, in all but ours, and no copies. Of products and
optimizers: Megatron-LM's `--fp8-recipe`, torchtitan's converters `float8` and `mx`; what a configuration says
without code of the user's own, AdamW.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, get_args

import numpy as np
from numpy.typing import NDArray

from lowband.cost.tiers import Beyond
from lowband.predict.workload import Workload
from lowband.spec.mesh import SELF
from lowband.spec.model import ModelSpec
from lowband.spec.schedules import Name
from lowband.spec.scheme import Scheme
from lowband.spec.stack import Stack
from lowband.spec.step import STEP, Optimizer, OurRecompute, Products, Recompute, Route

WIRES = tuple(row.name for row in STEP if row.coded)
ANY = "any"
_DEGREES = "tensor", "context", "expert", "pipeline"


@dataclass(frozen=True)
class Software:
    """One row.

    stacks:    those whose constants are its own
    places:    whether it places states so
    schedules: of a pipeline, and of accumulation; 1f1b is both
    recompute: what it keeps
    axes:      names of those that it has beside data
    attends:   how ranks along context may attend, from inside of a node outwards
    whole:     whether virtual stages need whole rounds of micro-batches, one per rank along pipeline
    adapters:  whether it trains modules as PEFT makes them
    routes:    of tokens to experts on other ranks
    copies:    whether loaded experts have copies
    products:  of a block, by dtype
    optimizers: those that its options name
    partial:   whether it recomputes so many of the layers, and only these
    offloads:  whether it has those states beyond the device, placed so
    """

    name: str
    stacks: tuple[str, ...]
    places: Callable[[Scheme, Workload], bool]
    schedules: frozenset[Name]
    recompute: frozenset[Recompute]
    axes: frozenset[str] = frozenset({"tensor", "context", "expert", "pipeline"})
    attends: Callable[[tuple[str, ...]], bool] = lambda _: True
    whole: bool = False
    adapters: bool = False
    routes: frozenset[Route] = frozenset({"flat"})
    copies: bool = False
    products: frozenset[Products] = frozenset({"bf16"})
    optimizers: frozenset[Optimizer] = frozenset({"adamw"})
    partial: Callable[[Workload], bool] = lambda _: False
    offloads: Callable[[Beyond, Scheme, Workload], bool] = lambda *_: False

    def runs(self, job: Workload, scheme: Scheme | None = None) -> bool:
        """Whether it runs the job, in at least one of its numbers of micro-batches. scheme: instead of its"""
        return self.computes(job) and self.holds(scheme or job.scheme, job)

    def holds(self, scheme: Scheme, job: Workload) -> bool:
        """Whether it has the job's states where the scheme places them, and in its tiers."""
        return self.places(scheme, job) and (job.placed is None or self.offloads(job.placed, scheme, job))

    def computes(self, job: Workload) -> bool:
        """Whether it has the job's axes, schedule and recomputation."""
        return (
            job.recompute in self.recompute
            and job.axes.row in self.schedules
            and (job.lora is None or self.adapters)
            and job.stack.products in self.products
            and job.stack.optimizer in self.optimizers
            and all(name in self.axes or getattr(job.axes, name) == 1 for name in _DEGREES)
            and (job.axes.expert == 1 or job.axes.route in self.routes)
            and (job.axes.copies == 0 or self.copies)
            and (job.axes.context == 1 or self.attends(attention(job)))
            and (job.recomputed == 1 or job.recompute == "none" or self.partial(job))
            and bool(self.takes(job).any())
        )

    def takes(self, job: Workload) -> NDArray[np.bool_]:
        """Of each number of micro-batches, whether it runs that many."""
        many = np.asarray(job.accumulation)
        rounds = self.whole and job.axes.chunks > 1
        return many % job.axes.pipeline == 0 if rounds else many > 0


def attention(job: Workload) -> tuple[str, ...]:
    """How ranks along context attend, from inside of a node outwards: one way, or two."""
    return tuple(each.split("=")[-1] for each in job.axes.context_attention.split(","))


def _is_exact(scheme: Scheme) -> bool:
    return all(scheme.wire(name) == "native" for name in WIRES)


def _of_megatron(s: Scheme, job: Workload) -> bool:
    return _is_exact(s) and s.secondary is None and (s.weights, s.grads) == (SELF, SELF)


def is_all(level: str, job: Workload) -> bool:
    """Whether a group of the level is all ranks along data, as a node is of a job that it holds."""
    return level != SELF and job.levels.size(level) == job.levels.world


def _of_deepspeed(s: Scheme, job: Workload) -> bool:
    wires = {name: s.wire(name) for name in WIRES}
    if job.is_in_stages:
        return _of_megatron(s, job)
    if is_all(s.weights, job):  # ZeRO-3, with weights of a node once more where ZeRO++ gathers them there
        gathers = wires["forward_gather"], wires["backward_gather"]
        quantized = gathers in (("native", "native"), ("int8", "int8")) or (
            s.secondary is not None and gathers == ("int8", "native")
        )
        is_copied = s.secondary is None or job.levels.size(s.secondary) > 1  # hpZ's 1 stands for none
        return quantized and is_copied and wires["boundary_reduce"] == "native"
    if s.weights != SELF:  # MiCS
        return _is_exact(s) and s.secondary is None and s.weights == s.grads == s.optim
    if s.optim == SELF:
        return _is_exact(s)
    return _is_exact(s) and is_all(s.optim, job) and (s.grads == SELF or is_all(s.grads, job))


def _of_torchtitan(s: Scheme, job: Workload) -> bool:
    """As FSDP2, over data and context together."""
    return _of_fsdp(s, job) and job.levels.size(s.optim) % job.axes.context == 0


def _of_fsdp(s: Scheme, job: Workload) -> bool:
    if not _is_exact(s) or s.optim == SELF:
        return _is_exact(s) and s.secondary is None
    if job.is_in_stages:  # weights stay gathered, and gradients whole, between micro-batches
        return s.secondary is None and s.weights == s.grads == SELF
    is_kept = s.secondary is None and s.weights == SELF and s.grads == s.optim
    return is_kept or s.weights == s.grads == s.optim


def _of_ours(s: Scheme, job: Workload) -> bool:
    return job.model.is_gpt or job.lora is not None  # examples/lora.py


def layers_of_stage(job: Workload) -> int:
    """Of each stage, how many layers are recomputed; 0 if not as many of each."""
    count = round(job.recomputed * job.model.layers)
    return 0 if count % job.axes.stages else count // job.axes.stages


def _are_alike(job: Workload) -> bool:
    """Whether all stages have equally many blocks, of one kind."""
    return not job.axes.is_uneven and job.model.linear_layers in (0, job.model.layers)


def every_of_rank(job: Workload) -> int:
    """Every how-many-th layer of a rank is recomputed, counted by it; 0 if not so."""
    if job.axes.is_uneven:
        return 0
    own, recomputed = job.model.layers // job.axes.pipeline, round(job.recomputed * job.model.layers)
    return next((n for n in range(2, own + 1) if own // n * job.axes.pipeline == recomputed), 0)


def _of_megatron_on_host(beyond: Beyond, s: Scheme, job: Workload) -> bool:
    where = beyond.optim, beyond.weights, beyond.stride, beyond.is_late
    return where == ("host", None, 0, False) and s.optim != SELF


def _of_deepspeed_in_tiers(beyond: Beyond, s: Scheme, job: Workload) -> bool:
    whole = beyond.share == 1 and beyond.weights is None and beyond.optim == "host"
    is_sharded = is_all(s.optim, job) and not job.is_in_stages
    is_by_host = beyond.stride == 0 and not beyond.is_late
    return is_sharded and is_by_host and beyond.optim is not None and (whole or is_all(s.weights, job))


def _of_fsdp_on_host(beyond: Beyond, s: Scheme, job: Workload) -> bool:
    return beyond == Beyond("host", "host") and s.optim != SELF


def _of_ours_in_tiers(beyond: Beyond, s: Scheme, job: Workload) -> bool:
    is_whole = (beyond.share, beyond.stride) == (1.0, 0)
    is_alone = not job.is_in_stages and job.model.experts is None and beyond.weights is None  # spec.run
    is_part = beyond.optim is not None and is_alone and not (beyond.optim == "disk" and beyond.stride)
    return is_part or (is_whole and not ("disk" in beyond.tiers and job.is_in_stages))


_ALL_SCHEDULES: Final[frozenset[Name]] = frozenset(
    {"1f1b", "interleaved", "breadth", "zb-h1", "zb-h2", "zb-v", "dualpipe-v"}
)
_MEGATRON_LM: Final[frozenset[Name]] = frozenset({"1f1b", "interleaved"})
_TORCHTITAN: Final[frozenset[Name]] = frozenset({"1f1b", "interleaved", "zb-v", "dualpipe-v"})

OURS: Final = Software(
    "lowband", ("ours",), _of_ours, _ALL_SCHEDULES, frozenset(get_args(OurRecompute)), adapters=True,
    offloads=_of_ours_in_tiers, routes=frozenset(get_args(Route)), copies=True,
    optimizers=frozenset({"adamw", "muon"}),
    partial=lambda job: job.lora is None and layers_of_stage(job) > 0 and _are_alike(job),
)  # fmt: skip
SOFTWARE: Final = (
    Software(
        "megatron-lm", ("megatron-lm", "megatron-lm-2021"), _of_megatron, _MEGATRON_LM,
        frozenset({"none", "selective", "full"}), whole=True, partial=lambda job: layers_of_stage(job) > 0,
        attends=lambda ways: ways in (("ring",), ("gather",), ("heads",), ("heads", "ring")),
        offloads=_of_megatron_on_host, products=frozenset({"bf16", "fp8", "mxfp8"}),
    ),
    Software(
        "deepspeed", ("deepspeed-zero",), _of_deepspeed, frozenset({"1f1b"}), frozenset({"none", "full"}),
        attends=lambda ways: ways == ("heads",), adapters=True, offloads=_of_deepspeed_in_tiers,
    ),
    Software(
        "torchtitan", ("fsdp2", "fsdp2-2025"), _of_torchtitan, _TORCHTITAN, frozenset({"none", "op", "full"}),
        attends=lambda ways: ways in (("ring",), ("gather",)),
        partial=lambda job: every_of_rank(job) > 0, offloads=_of_fsdp_on_host,
        products=frozenset({"bf16", "fp8", "mxfp8"}),
    ),
    Software(
        "llm-foundry", ("fsdp",), _of_fsdp, frozenset({"1f1b"}), frozenset({"none", "full"}), frozenset(),
        partial=lambda _: True,
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
