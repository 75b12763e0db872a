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
from typing import Final, Literal

from lowband.spec.mesh import SELF, WORLD
from lowband.spec.scheme import Scheme
from lowband.spec.step import Collective, Kind, States
from lowband.spec.tiers import HOST, at

# Between all ranks along the axis, in the dtype that the activations have.
ALONG: Final = Scheme(name="activations", weights=WORLD, grads=WORLD, optim=WORLD)


def _of_layer(
    name: str, kind: Kind, during: Literal["forward", "backward"],
    carries: Literal["masters", "activations"] = "activations",
) -> Collective:  # fmt: skip
    return Collective(name, kind, SELF, WORLD, carries, "layer", during)


def _of_step(name: str, kind: Kind, during: Literal["forward", "backward"] | None = None) -> Collective:
    return Collective(name, kind, SELF, WORLD, "masters", "step", during)


# fmt: off
LEAVE_REDUCE = _of_layer("leave_reduce", "all_reduce", "forward")
ENTER_REDUCE = _of_layer("enter_reduce", "all_reduce", "backward")
ENTER_GATHER = _of_layer("enter_gather", "gather", "forward")
ENTER_SCATTER = _of_layer("enter_scatter", "reduce", "backward")
LEAVE_SCATTER = _of_layer("leave_scatter", "reduce", "forward")
LEAVE_GATHER = _of_layer("leave_gather", "gather", "backward")
SPLIT_GATHER = _of_layer("split_gather", "gather", "backward")
JOIN_GATHER = _of_layer("join_gather", "gather", "forward")
LOSS_GATHER = _of_layer(  # of each token: the largest logit, the sum of exponentials, the target's logit
    "loss_gather", "gather", "forward")
SHARED_REDUCE = _of_step(  # gradients of parameters that every rank has whole, each from its own tokens
    "shared_reduce", "all_reduce", "backward")
TENSOR_NORM = _of_step("tensor_norm", "gather")  # as NORM_GATHER, over the tensor axis
STAGE_OUTPUT = _of_layer(  # of each micro-batch, from a stage to the next one, if that is on another rank
    "stage_output", "swap", "forward")
STAGE_GRAD = _of_layer("stage_grad", "swap", "backward")  # and its gradient back
TIED_REDUCE = _of_step(  # gradients of parameters that stages on several ranks share
    "tied_reduce", "swap", "backward")
STAGES_NORM = _of_step("stages_norm", "gather")  # as NORM_GATHER, over the pipeline axis
CONTEXT_HEADS = _of_layer(  # a rank's tokens of all heads become all tokens of its heads
    "context_heads", "all_to_all", "forward")
CONTEXT_HEADS_GRAD = _of_layer("context_heads_grad", "all_to_all", "backward")
CONTEXT_GATHER = _of_layer("context_gather", "gather", "forward")  # keys and values
CONTEXT_GATHER_AGAIN = _of_layer("context_gather_again", "gather", "backward")
CONTEXT_SCATTER = _of_layer("context_scatter", "reduce", "backward")  # their gradients
CONTEXT_RING = _of_layer("context_ring", "swap", "forward")  # keys and values, to the next rank
CONTEXT_RING_AGAIN = _of_layer("context_ring_again", "swap", "backward")
CONTEXT_RING_GRAD = _of_layer(  # their gradients, which travel with them, and home
    "context_ring_grad", "swap", "backward")
CONTEXT_DOCUMENTS = _of_layer(  # of each token, the number of its document
    "context_documents", "gather", "forward")
CONTEXT_STATE_PASS = _of_layer(  # the sum of states so far, to the next rank
    "context_state_pass", "swap", "forward", "masters")
CONTEXT_STATE_PASS_GRAD = _of_layer("context_state_pass_grad", "swap", "backward", "masters")
CONTEXT_STATE_GATHER = _of_layer("context_state_gather", "gather", "forward", "masters")  # every rank's state
CONTEXT_STATE_GATHER_GRAD = _of_layer("context_state_gather_grad", "gather", "backward", "masters")
CONTEXT_STATE_SCAN = _of_layer(  # parts of groups' states, level by level
    "context_state_scan", "scan", "forward", "masters")
CONTEXT_STATE_SCAN_GRAD = _of_layer("context_state_scan_grad", "scan", "backward", "masters")
TOKENS_COUNT = _of_layer(  # by which a loss is divided; over the data axis, with context
    "tokens_count", "gather", "forward", "masters")
ROUTE_COUNTS = _of_layer(  # rows and pairs that will come, from each partner
    "route_counts", "all_to_all", "forward", "masters")
ROUTE_OUT = _of_layer("route_out", "all_to_all", "forward")  # tokens, to ranks that have an expert for them
ROUTE_OUT_GRAD = _of_layer("route_out_grad", "all_to_all", "backward")
ROUTE_PAIRS = _of_layer(  # of each pair of a token and an expert: which row, which expert
    "route_pairs", "all_to_all", "forward", "masters")
ROUTE_WEIGHTS = _of_layer(  # and its weight, where experts' outputs are summed before they return
    "route_weights", "all_to_all", "forward", "masters")
ROUTE_WEIGHTS_GRAD = _of_layer("route_weights_grad", "all_to_all", "backward", "masters")
ROUTE_BACK = _of_layer("route_back", "all_to_all", "forward")  # experts' outputs, or sums of them
ROUTE_BACK_GRAD = _of_layer("route_back_grad", "all_to_all", "backward")
EXPERT_COPIES = _of_layer(  # weights of the most loaded experts, to the ranks that compute with copies
    "expert_copies", "all_to_all", "forward")
EXPERT_COPIES_GRAD = _of_layer("expert_copies_grad", "all_to_all", "backward")  # and their gradients back
EXPERTS_LOAD = _of_step(  # pairs of each expert of all layers, by which they are balanced; over data
    "experts_load", "all_reduce")
KEEP_STASH = Collective(  # what a unit's forward keeps for its backward, to host memory
    "keep_stash", "copy", SELF, SELF, "activations", "layer", "forward")
KEEP_FETCH = Collective(
    "keep_fetch", "copy", SELF, SELF, "activations", "layer", "backward")
STATE_GATHER = _of_step("tensor_state", "gather")  # whole parameters, for a state dict; no part of a step
ALIKE_GATHER = _of_step(  # what ranks that compute one batch must have in common; no part of a step
    "alike", "gather")
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
