"""The collectives of one optimizer step, as data: a row per collective of a unit, in the order in which data
moves. Schemes name a wire for each row; bytes, buffers, time, the planner, peers and the engine iterate over
the rows.
"""

from dataclasses import dataclass
from typing import Literal, TypeVar

from lowband.spec.mesh import SELF, WORLD
from lowband.spec.wire import Wire

T = TypeVar("T")

# A level of the machine, named by the state of the scheme that lies there, or by the replica that its ranks
# make up; or `self` or `world`.
Place = Literal["self", "weights", "backward", "grads", "optim", "replica", "world"]

# Of gradient accumulation: depth: one micro-batch after the other; breadth: each unit computes all of them.
Order = Literal["depth", "breadth"]

# The same of a pipeline, by the names in use: breadth-first is breadth, all others are depth. 1f1b with
# several chunks is interleaved; the lists of all of them are in spec/schedules.py.
Schedule = Literal["1f1b", "breadth-first", "zb-h1", "zb-h2", "zb-v", "dualpipe-v"]

Kind = Literal["gather", "reduce", "all_reduce", "swap", "all_to_all", "scan", "copy"]

# How collectives run: a hop per level, one ring over all their ranks, or one exchange between all of them.
Pattern = Literal["hops", "flat", "joined"]

# How tokens travel to experts, see cost/experts.py.
Route = Literal["flat", "hops", "merged"]

# How states of linear layers travel between ranks along context, see spec/context.py.
States = Literal["pass", "gather", "scan"]
StatesOption = Literal["auto", States]

# Of a software stack: fused, or with its scores in memory; and in which dtype gradients are reduced.
Attention = Literal["flash", "plain"]
ReduceDtype = Literal["bf16", "fp16", "fp32"]
# And in which dtype blocks multiply; mxfp8: with a scale for 32 values (OCP Microscaling Formats 1.0).
Products = Literal["bf16", "fp8", "mxfp8"]
# Which of its operations that wait for memory are one kernel: norms and rotary embeddings, as compiled;
# norms; or none, so that each reads and writes what it works on (cost/compute.py).
Operations = Literal["fused", "norms", "single"]
# What a block keeps of its forward for its backward (cost/activations.py); of these, what runs of ours can.
Recompute = Literal["none", "selective", "op", "full", "host"]
OurRecompute = Literal["none", "full", "host"]
# The optimizer of matrices: AdamW with fp32 moments, or in 8 bits with a scale for 256 values, or Muon.
Optimizer = Literal["adamw", "adamw8bit", "muon"]


@dataclass(frozen=True)
class Collective:
    """One row.

    kind:    gather: shards of `outer` become the shard of `inner`; reduce: the shard of `inner` becomes the
             summed shard of `outer`; all_reduce: a reduce and a gather back; swap: the shard of `inner`
             goes to one rank and another one's comes from one, across the links of one level; all_to_all:
             each rank has a part for every other one; scan: the shards of ranks before it become a
             rank's sum; copy: a rank's own shard goes to another memory of its
    carries: weights and activations travel in the compute dtype, gradients in the reduce dtype, master
             weights in fp32
    every:   once per pass over a unit (see `passes`), once per optimizer step (at the boundary of
             accumulation), or once per exchange between replicas (`every` of the scheme's sync); of
             activations, wherever the model has one, in each micro-batch
    during:  the pass whose computation can hide it; None: it comes after the optimizer
    of_root: whether the root unit takes part; it stays gathered from forward to backward
    coded:   the quantized wire that the planner tries besides native; None: native only
    """

    name: str
    kind: Kind
    inner: Place
    outer: Place
    carries: Literal["weights", "gradients", "masters", "activations"]
    every: Literal["pass", "step", "sync", "layer"]
    during: Literal["forward", "backward"] | None
    of_root: bool = True
    coded: Wire | None = None

    def dtype(self, compute_dtype: str, reduce_dtype: str) -> str:
        """The native dtype of the data it carries."""
        computed = {"weights": compute_dtype, "activations": compute_dtype}
        return {**computed, "gradients": reduce_dtype, "masters": "fp32"}[self.carries]


# fmt: off
FORWARD_GATHER = Collective(
    "forward_gather", "gather", SELF, "weights", "weights", "pass", "forward", coded="int8")
BACKWARD_GATHER = Collective(  # from the secondary shard, where the scheme keeps one
    "backward_gather", "gather", SELF, "backward", "weights", "pass", "backward", of_root=False, coded="int8")
UPDATE_GATHER = Collective(  # new weights, for the next step's first forward
    "update_gather", "gather", "weights", "optim", "weights", "step", "forward")
SYNC_REDUCE = Collective(  # how far replicas have moved, and the outer optimizer's update back
    "sync_reduce", "all_reduce", "replica", WORLD, "masters", "sync", None)
SYNC_SWAP = Collective(  # a replica's weights, instead, where it has one partner at a time
    "sync_swap", "swap", "replica", WORLD, "masters", "sync", None)
ANCHOR_GATHER = Collective(  # new weights after it, where several ranks of a replica hold the same ones
    "anchor_gather", "gather", "optim", "replica", "masters", "sync", None)
STEP: tuple[Collective, ...] = (
    FORWARD_GATHER,
    BACKWARD_GATHER,
    Collective("grad_reduce", "reduce", SELF, "grads", "gradients", "pass", "backward", coded="int4"),
    Collective("boundary_reduce", "reduce", "grads", "optim", "gradients", "step", "backward", coded="int4"),
    Collective("replica_reduce", "all_reduce", "optim", "replica", "gradients", "step", "backward"),
    SYNC_REDUCE,
    SYNC_SWAP,
    ANCHOR_GATHER,
    UPDATE_GATHER,
)
MEETINGS = (SYNC_REDUCE, SYNC_SWAP)  # a scheme with sync runs one of them

# Of a state that lies in another tier than the device (spec.tiers). A scheme has no wire for them.
STASH = Collective(  # gradients, averaged, to the optimizer's shard
    "stash", "copy", "optim", "optim", "masters", "step", "backward")
FETCH = Collective(  # new weights back, before `update_gather`
    "fetch", "copy", "optim", "optim", "weights", "step", "forward")
COPIES: tuple[Collective, ...] = (STASH, FETCH)
# And of the copy of the weights, before each gather but of new ones, which come by way of `update_gather`,
# and of a secondary copy, which is on the device.
FORWARD_FETCH = Collective("forward_fetch", "copy", "weights", "weights", "weights", "pass", "forward")
BACKWARD_FETCH = Collective(
    "backward_fetch", "copy", "weights", "weights", "weights", "pass", "backward", of_root=False)
WEIGHTS_STASH = Collective(  # new weights, once they were gathered
    "weights_stash", "copy", "weights", "weights", "weights", "step", "forward")
WEIGHTS_COPIES: tuple[Collective, ...] = (FORWARD_FETCH, BACKWARD_FETCH, WEIGHTS_STASH)
# fmt: on

# One fp64 number from each rank, for clipping by the global norm; belongs to no unit and is always native.
NORM_GATHER = "norm_gather"


def passes(accumulation: T, order: Order) -> T | Literal[1]:
    """How often a step passes over each unit, and so runs its rows of `every` pass.

    accumulation: micro-batches per step
    """
    return accumulation if order == "depth" else 1


def pattern_of(chosen: Pattern, kind: Kind, is_plain: bool) -> Pattern:
    """How a collective runs where a pattern was chosen. The only home of this rule.

    is_plain: whether its values travel unchanged
    A reduction on any other wire always goes hop by hop: a ring would round its partial sums at each step,
    and one exchange would round every rank's values where hops round those of a level's sums. The quantized
    reduction of ZeRO++, qgZ, is made of hops for that reason (arXiv 2306.10209, section 3.3). A swap has one
    level.
    """
    return chosen if kind == "gather" or (is_plain and kind != "swap") else "hops"


def reductions(every: Literal["pass", "step"]) -> list[Collective]:
    """The rows that a unit's gradient passes through, in order."""
    return [row for row in STEP if row.carries == "gradients" and row.every == every]
