"""FLOPs of training, one convention per function. Log seconds; derive these.

Letters: N parameters, L layers, H hidden, T sequence length, V vocabulary.
"""

from collections.abc import Mapping
from functools import lru_cache
from math import prod

import numpy as np

from lowband.cost.numbers import Num
from lowband.spec.model import ModelSpec

MODEL_CONVENTION = (
    "6 (N - position and input embeddings) + 12 L H T per token; no recomputation; "
    "attention not halved for causality"
)
BACKWARD_MATMUL = 2  # each product of the forward has two in the backward


def model_flops_per_token(model: ModelSpec, seq_len: Num) -> Num:
    """Model FLOPs (for MFU): forward 2, backward 4 per weight and token, plus the two attention products.

    Every weight that multiplies an activation counts, of experts those that a token goes to; an embedding
    lookup is not a multiplication, but a tied embedding counts once, as the output layer. Source: PaLM (arXiv
    2204.02311), appendix B. In a linear layer a token meets a state as wide as a head, not T keys (arXiv
    2006.16236, section 3.4).
    """
    lookups = model.vocab * model.hidden * (0 if model.tied_head else 1)
    if model.positions == "learned":
        lookups += model.seq_len * model.hidden
    softmax = (model.layers - model.linear_layers) * keys_seen(model, seq_len)
    products = 3 * products_per_key(model) * (softmax + model.linear_layers * model.head_size)
    idle = (model.layers - model.dense_layers) * model.idle_elements
    return 6 * (model.parameters - idle - lookups) + products


def keys_seen(model: ModelSpec, seq_len: Num) -> Num:
    """Keys that a query meets in the mean softmax layer, twice those that causality leaves: T if it sees all.

    A window of W that slides leaves a query W keys, the first W queries fewer: 2 W - W^2 / T; chunks leave W.
    """
    if model.window is None:
        return seq_len
    w = np.minimum(model.window, seq_len)
    near = w if model.chunked else 2 * w - w**2 / seq_len
    full = 0 if model.full_every is None else model.layers // model.full_every / model.layers
    return full * seq_len + (1 - full) * near


def products_per_key(model: ModelSpec) -> int:
    """Forward FLOPs of a token's two attention products with one key, over all heads."""
    return 2 * (model.query_hidden + model.out_hidden)


@lru_cache(maxsize=256)
def block_matmul_flops_per_token(model: ModelSpec) -> float:
    """Forward FLOPs per token of the mean block's matrices: 2 per weight that it meets."""
    dense, weights = (_matrices(model.block_shapes(kind)) for kind in (True, False))
    routed = 2 * (weights - model.idle_elements)
    return (model.dense_layers * 2 * dense + (model.layers - model.dense_layers) * routed) / model.layers


def _matrices(shapes: Mapping[str, tuple[int, ...]], start: str = "") -> int:
    """Weights of what multiplies an activation."""
    named = ((name, shape) for name, shape in shapes.items() if name.startswith(start))
    return sum(prod(shape) for name, shape in named if len(shape) > 1 and not name.endswith(".bias"))


def uncut_flops_per_token(model: ModelSpec) -> tuple[float, float]:
    """Of these, of what ranks along tensor do not divide: a router and shared experts; and of the experts of
    a token. Without experts none."""
    if model.experts is None:
        return 0, 0
    weights, share = _matrices(model.block_shapes(), "mlp."), 1 - model.dense_share
    met = expert_elements(model) * model.top_k
    return share * 2 * (weights - expert_elements(model) * model.experts), share * 2 * met


def expert_elements(model: ModelSpec) -> int:
    """Weights of one expert of a block."""
    return (3 if model.gated else 2) * model.hidden * model.expert_width if model.experts else 0


def attention_flops_per_token(model: ModelSpec, seq_len: Num) -> Num:
    """Forward FLOPs per token of one block's two attention products, not halved for causality: 4 H T, where
    heads are as wide as hidden together and see everything."""
    return products_per_key(model) * keys_seen(model, seq_len)


def head_flops_per_token(model: ModelSpec) -> int:
    """Forward FLOPs per token of the output layer."""
    return 2 * model.hidden * model.vocab


def hardware_flops_per_token(model: ModelSpec, seq_len: Num, recompute: str) -> Num:
    """FLOPs of the products that run (for HFU): model FLOPs plus the recomputed forward.

    recompute: none, host | selective (4 H T per layer) | op (2 per every other weight of a block) | full (2
    per weight and 4 H T per layer). Attention is not halved for causality; in a linear layer the width of a
    head stands for T, and selective recomputes nothing there.
    Source: equation 3 of Narayanan et al. (arXiv 2104.04473) for full;
    appendix A of Korthikanti et al. (arXiv 2205.05198) for selective.
    """
    scores = (model.layers - model.linear_layers) * attention_flops_per_token(model, seq_len)
    states = model.linear_layers * products_per_key(model) * model.head_size
    blocks = model.layers * block_matmul_flops_per_token(model)
    again = {"selective": scores, "op": blocks / 2, "full": blocks + scores + states}.get(recompute, 0)
    return model_flops_per_token(model, seq_len) + again
