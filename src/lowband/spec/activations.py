"""Exchanges of activations between the ranks along an axis: rows, as those of spec.step are of units.

    plain       x -> [column product] .. [row product] -> x      forward            backward
                enter                                            nothing            all-reduce
                                                  leave          all-reduce         nothing
    sequence    each rank has a part of the tokens outside
                enter                                            gather tokens      reduce to tokens
                                                  leave          reduce to tokens   gather tokens

Source: Megatron-LM (arXiv 1909.08053, section 3; with sequence parallelism arXiv 2205.05198, section 4.2.2).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from lowband.spec.mesh import SELF, WORLD
from lowband.spec.scheme import Scheme
from lowband.spec.step import Collective, States
from lowband.spec.tiers import HOST, at

# Between all ranks along the axis, in the dtype that the activations have.
ALONG: Final = Scheme(name="activations", weights=WORLD, grads=WORLD, optim=WORLD)


# fmt: off
LEAVE_REDUCE = Collective("leave_reduce", "all_reduce", SELF, WORLD, "activations", "layer", "forward")
ENTER_REDUCE = Collective("enter_reduce", "all_reduce", SELF, WORLD, "activations", "layer", "backward")
ENTER_GATHER = Collective("enter_gather", "gather", SELF, WORLD, "activations", "layer", "forward")
ENTER_SCATTER = Collective("enter_scatter", "reduce", SELF, WORLD, "activations", "layer", "backward")
LEAVE_SCATTER = Collective("leave_scatter", "reduce", SELF, WORLD, "activations", "layer", "forward")
LEAVE_GATHER = Collective("leave_gather", "gather", SELF, WORLD, "activations", "layer", "backward")
SPLIT_GATHER = Collective("split_gather", "gather", SELF, WORLD, "activations", "layer", "backward")
JOIN_GATHER = Collective("join_gather", "gather", SELF, WORLD, "activations", "layer", "forward")
LOSS_GATHER = Collective(  # of each token: the largest logit, the sum of exponentials, the target's logit
    "loss_gather", "gather", SELF, WORLD, "activations", "layer", "forward")
SHARED_REDUCE = Collective(  # gradients of parameters that every rank has whole, each from its own tokens
    "shared_reduce", "all_reduce", SELF, WORLD, "masters", "step", "backward")
TENSOR_NORM = Collective(  # as NORM_GATHER, over the tensor axis
    "tensor_norm", "gather", SELF, WORLD, "masters", "step", None)
STAGE_OUTPUT = Collective(  # of each micro-batch, from a stage to the next one, if that is on another rank
    "stage_output", "swap", SELF, WORLD, "activations", "layer", "forward")
STAGE_GRAD = Collective(  # and its gradient back
    "stage_grad", "swap", SELF, WORLD, "activations", "layer", "backward")
TIED_REDUCE = Collective(  # gradients of parameters that stages on several ranks share
    "tied_reduce", "swap", SELF, WORLD, "masters", "step", "backward")
STAGES_NORM = Collective(  # as NORM_GATHER, over the pipeline axis
    "stages_norm", "gather", SELF, WORLD, "masters", "step", None)
CONTEXT_HEADS = Collective(  # a rank's tokens of all heads become all tokens of its heads
    "context_heads", "all_to_all", SELF, WORLD, "activations", "layer", "forward")
CONTEXT_HEADS_GRAD = Collective(
    "context_heads_grad", "all_to_all", SELF, WORLD, "activations", "layer", "backward")
CONTEXT_GATHER = Collective(  # keys and values
    "context_gather", "gather", SELF, WORLD, "activations", "layer", "forward")
CONTEXT_GATHER_AGAIN = Collective(
    "context_gather_again", "gather", SELF, WORLD, "activations", "layer", "backward")
CONTEXT_SCATTER = Collective(  # their gradients
    "context_scatter", "reduce", SELF, WORLD, "activations", "layer", "backward")
CONTEXT_RING = Collective(  # keys and values, to the next rank
    "context_ring", "swap", SELF, WORLD, "activations", "layer", "forward")
CONTEXT_RING_AGAIN = Collective(
    "context_ring_again", "swap", SELF, WORLD, "activations", "layer", "backward")
CONTEXT_RING_GRAD = Collective(  # their gradients, which travel with them, and home
    "context_ring_grad", "swap", SELF, WORLD, "activations", "layer", "backward")
CONTEXT_DOCUMENTS = Collective(  # of each token, the number of its document
    "context_documents", "gather", SELF, WORLD, "activations", "layer", "forward")
CONTEXT_STATE_PASS = Collective(  # the sum of states so far, to the next rank
    "context_state_pass", "swap", SELF, WORLD, "masters", "layer", "forward")
CONTEXT_STATE_PASS_GRAD = Collective(
    "context_state_pass_grad", "swap", SELF, WORLD, "masters", "layer", "backward")
CONTEXT_STATE_GATHER = Collective(  # every rank's state
    "context_state_gather", "gather", SELF, WORLD, "masters", "layer", "forward")
CONTEXT_STATE_GATHER_GRAD = Collective(
    "context_state_gather_grad", "gather", SELF, WORLD, "masters", "layer", "backward")
CONTEXT_STATE_SCAN = Collective(  # parts of groups' states, level by level
    "context_state_scan", "scan", SELF, WORLD, "masters", "layer", "forward")
CONTEXT_STATE_SCAN_GRAD = Collective(
    "context_state_scan_grad", "scan", SELF, WORLD, "masters", "layer", "backward")
TOKENS_COUNT = Collective(  # by which a loss is divided; over the data axis, with context
    "tokens_count", "gather", SELF, WORLD, "masters", "layer", "forward")
ROUTE_COUNTS = Collective(  # rows and pairs that will come, from each partner
    "route_counts", "all_to_all", SELF, WORLD, "masters", "layer", "forward")
ROUTE_OUT = Collective(  # tokens, to ranks that have an expert for them
    "route_out", "all_to_all", SELF, WORLD, "activations", "layer", "forward")
ROUTE_OUT_GRAD = Collective("route_out_grad", "all_to_all", SELF, WORLD, "activations", "layer", "backward")
ROUTE_PAIRS = Collective(  # of each pair of a token and an expert: which row, which expert
    "route_pairs", "all_to_all", SELF, WORLD, "masters", "layer", "forward")
ROUTE_WEIGHTS = Collective(  # and its weight, where experts' outputs are summed before they return
    "route_weights", "all_to_all", SELF, WORLD, "masters", "layer", "forward")
ROUTE_WEIGHTS_GRAD = Collective(
    "route_weights_grad", "all_to_all", SELF, WORLD, "masters", "layer", "backward")
ROUTE_BACK = Collective(  # experts' outputs, or sums of them
    "route_back", "all_to_all", SELF, WORLD, "activations", "layer", "forward")
ROUTE_BACK_GRAD = Collective("route_back_grad", "all_to_all", SELF, WORLD, "activations", "layer", "backward")
EXPERT_COPIES = Collective(  # weights of the most loaded experts, to the ranks that compute with copies
    "expert_copies", "all_to_all", SELF, WORLD, "activations", "layer", "forward")
EXPERT_COPIES_GRAD = Collective(  # and their gradients back
    "expert_copies_grad", "all_to_all", SELF, WORLD, "activations", "layer", "backward")
EXPERTS_LOAD = Collective(  # pairs of each expert of all layers, by which they are balanced; over data
    "experts_load", "all_reduce", SELF, WORLD, "masters", "step", None)
KEEP_STASH = Collective(  # what a unit's forward keeps for its backward, to host memory
    "keep_stash", "copy", SELF, SELF, "activations", "layer", "forward")
KEEP_FETCH = Collective(
    "keep_fetch", "copy", SELF, SELF, "activations", "layer", "backward")
STATE_GATHER = Collective(  # whole parameters, for a state dict; no part of a step
    "tensor_state", "gather", SELF, WORLD, "masters", "step", None)
ALIKE_GATHER = Collective(  # what ranks that compute one batch must have in common; no part of a step
    "alike", "gather", SELF, WORLD, "masters", "step", None)
TENSOR: Final = (
    LEAVE_REDUCE, ENTER_REDUCE, ENTER_GATHER, ENTER_SCATTER, LEAVE_SCATTER, LEAVE_GATHER, SPLIT_GATHER,
    JOIN_GATHER, LOSS_GATHER, SHARED_REDUCE, TENSOR_NORM,
)
CONTEXT_STATES: Final[Mapping[States, tuple[Collective, Collective]]] = {  # forward, backward
    "pass": (CONTEXT_STATE_PASS, CONTEXT_STATE_PASS_GRAD),
    "gather": (CONTEXT_STATE_GATHER, CONTEXT_STATE_GATHER_GRAD),
    "scan": (CONTEXT_STATE_SCAN, CONTEXT_STATE_SCAN_GRAD),
}
CONTEXT: Final = (
    CONTEXT_HEADS, CONTEXT_HEADS_GRAD, CONTEXT_GATHER, CONTEXT_GATHER_AGAIN, CONTEXT_SCATTER,
    CONTEXT_RING, CONTEXT_RING_AGAIN, CONTEXT_RING_GRAD, CONTEXT_DOCUMENTS, TOKENS_COUNT,
    *(row for rows in CONTEXT_STATES.values() for row in rows),
)
EXPERT: Final = (
    ROUTE_COUNTS, ROUTE_OUT, ROUTE_OUT_GRAD, ROUTE_PAIRS, ROUTE_WEIGHTS, ROUTE_WEIGHTS_GRAD, ROUTE_BACK,
    ROUTE_BACK_GRAD, EXPERT_COPIES, EXPERT_COPIES_GRAD, EXPERTS_LOAD,
)
PIPELINE: Final = (STAGE_OUTPUT, STAGE_GRAD, TIED_REDUCE, STAGES_NORM)
KEPT: Final = (KEEP_STASH, KEEP_FETCH)
KEPT_KIND: Final = at("activations", HOST)  # of memory
# fmt: on


@dataclass(frozen=True)
class Exchange:
    """What a tensor passes through: a row on its way forward, and one for its gradient.

    dim:  the dimension that a gather or a reduction joins or divides; all-reduces keep the shape
    None: nothing is sent; a rank takes its own part where the other way gathers, else the tensor stays
    """

    forward: Collective | None
    backward: Collective | None
    dim: int

    @property
    def back(self) -> "Exchange":
        """The one that its gradient passes through."""
        return Exchange(self.backward, self.forward, self.dim)

    @property
    def takes_part(self) -> bool:
        """Whether its way forward is to take the rank's own part."""
        return self.forward is None and self.backward is not None and self.backward.kind == "gather"


TOKENS: Final = 1  # dimension of activations, [sequences, tokens, ...]
ENTER: Final = Exchange(None, ENTER_REDUCE, TOKENS)
LEAVE: Final = Exchange(LEAVE_REDUCE, None, TOKENS)
ENTER_TOKENS: Final = Exchange(ENTER_GATHER, ENTER_SCATTER, TOKENS)
LEAVE_TOKENS: Final = Exchange(LEAVE_SCATTER, LEAVE_GATHER, TOKENS)
SPLIT: Final = Exchange(None, SPLIT_GATHER, TOKENS)
JOIN: Final = Exchange(JOIN_GATHER, None, -1)
