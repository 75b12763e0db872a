"""FLOPs of training, one convention per function. Log seconds; derive these.

Letters: N parameters, L layers, H hidden, T sequence length, V vocabulary.
"""

from math import prod

from lowband.cost.numbers import Num
from lowband.spec.model import ModelSpec

MODEL_CONVENTION = (
    "6 (N - position and input embeddings) + 12 L H T per token; no recomputation; "
    "attention not halved for causality"
)
BACKWARD_MATMUL = 2  # each product of the forward has two in the backward


def model_flops_per_token(model: ModelSpec, seq_len: int) -> int:
    """Model FLOPs (for MFU): forward 2, backward 4 per weight and token, plus the two attention products.

    Every weight that multiplies an activation counts, of experts those that a token goes to; an embedding
    lookup is not a multiplication, but a tied embedding counts once, as the output layer. Source: PaLM (arXiv
    2204.02311), appendix B. In a linear layer a token meets a state as wide as a head, not T keys (arXiv
    2006.16236, section 3.4).
    """
    lookups = model.vocab * model.hidden * (0 if model.tied_head else 1)
    if model.positions == "learned":
        lookups += model.seq_len * model.hidden
    met = (model.layers - model.linear_layers) * seq_len + model.linear_layers * (model.hidden // model.heads)
    return 6 * (model.parameters - model.layers * model.idle_elements - lookups) + 12 * model.hidden * met


def block_matmul_flops_per_token(model: ModelSpec) -> int:
    """Forward FLOPs per token of one block's matrices: 2 per weight that it meets."""
    weights = sum(prod(shape) for shape in model.block_shapes().values() if len(shape) > 1)
    return 2 * (weights - model.idle_elements)


def uncut_flops_per_token(model: ModelSpec) -> tuple[int, int]:
    """Of these, of what ranks along tensor do not divide: a router and shared experts; and of the experts of
    a token. Without experts none."""
    if model.experts is None:
        return 0, 0
    shapes = model.block_shapes().items()
    weights = sum(prod(shape) for name, shape in shapes if name.startswith("mlp.") and len(shape) > 1)
    met = expert_elements(model) * model.top_k
    return 2 * (weights - expert_elements(model) * model.experts), 2 * met


def expert_elements(model: ModelSpec) -> int:
    """Weights of one expert of a block."""
    return (3 if model.gated else 2) * model.hidden * model.expert_width if model.experts else 0


def attention_flops_per_token(model: ModelSpec, seq_len: Num) -> Num:
    """Forward FLOPs per token of one block's two attention products, not halved for causality: 4 H T."""
    return 4 * model.hidden * seq_len


def head_flops_per_token(model: ModelSpec) -> int:
    """Forward FLOPs per token of the output layer."""
    return 2 * model.hidden * model.vocab


def hardware_flops_per_token(model: ModelSpec, seq_len: int, recompute: str) -> float:
    """FLOPs of the products that run (for HFU): model FLOPs plus the recomputed forward.

    recompute: none | selective (4 H T per layer) | op (2 per every other weight of a block) | full (2 per
    weight and 4 H T per layer). Attention is not halved for causality; in a linear layer the width of a head
    stands for T, and selective recomputes nothing there.
    Source: equation 3 of Narayanan et al. (arXiv 2104.04473) for full;
    appendix A of Korthikanti et al. (arXiv 2205.05198) for selective.
    """
    scores = (model.layers - model.linear_layers) * attention_flops_per_token(model, seq_len)
    states = model.linear_layers * attention_flops_per_token(model, model.hidden // model.heads)
    blocks = model.layers * block_matmul_flops_per_token(model)
    again = {"none": 0, "selective": scores, "op": blocks / 2, "full": blocks + scores + states}[recompute]
    return float(model_flops_per_token(model, seq_len) + again)
