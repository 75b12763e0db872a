"""What linear attention of a rank computes, moves, keeps and holds, in closed form, as the engine runs it.

Tokens are computed in chunks of C (engine/parallel/linear.py), with sums in fp32; a rank's last chunk is
filled up. Per token, with a heads of D, h = a D, and one more column of values, the normalizer:

    FLOPs     forward   a (4 D (D + 1) + 2 C (2 D + 1)): two products with states, two inside of a chunk
              backward  a (10 D (D + 1) + 2 C (5 D + 2)): five, and five
    bytes     forward   h (116 + 32 D / C + 16 C / D): queries, keys and values to fp32 and into chunks,
                        states of chunks and their sums, scores of chunks, the output; the backward twice that
    kept      w bytes a value: queries and keys behind the feature map, values with their column, the output
              before its division: 4 w h + 2 w a; and per sequence the state before the rank, in fp32
    held      in the backward, fp32: queries, keys, values, gradient and their three gradients 28 h, weights
              and scores of a chunk 8 h C / D, three states a chunk 12 h D / C; gradients in and out 4 w h

States travel behind what does not need them: forward, the products inside of a chunk; backward, these and two
of the five with states.
"""

from dataclasses import dataclass

import numpy as np

from lowband.cost.memory import GRAD_BYTES, MASTER_BYTES
from lowband.cost.numbers import Num
from lowband.cost.states import state_elements
from lowband.spec.model import CHUNK, ModelSpec
from lowband.spec.wire import DTYPE_BYTES

KERNELS = 34  # in a block's forward, without fusion: attention's 23, and those of any other block


@dataclass(frozen=True)
class Products:
    """FLOPs of a rank's linear attention in one block and sequence. hidden: behind which states travel"""

    forward: Num
    backward: Num
    forward_hidden: Num
    backward_hidden: Num


def chunk(own_tokens: Num) -> Num:
    """Tokens of a chunk. own_tokens: of a sequence, a rank's"""
    return np.minimum(CHUNK, own_tokens)


def products(model: ModelSpec, tensor: int, own_tokens: Num) -> Products:
    """own_tokens: of a sequence, a rank's"""
    C, D = chunk(own_tokens), model.head_size
    tokens_and_heads = -(-own_tokens // C) * C * model.heads / tensor
    state = 2 * D * (D + 1) * tokens_and_heads  # FLOPs of one product with states
    inside, inside_back = (2 * C * n * tokens_and_heads for n in (2 * D + 1, 5 * D + 2))
    return Products(2 * state + inside, 5 * state + inside_back, inside, 2 * state + inside_back)


def moved_bytes(model: ModelSpec, tensor: int, own_tokens: Num) -> Num:
    """Bytes that the forward of one block and sequence reads and writes beside its matrices' products."""
    C, D = chunk(own_tokens), model.head_size
    return own_tokens * model.hidden / tensor * (116 + 32 * D / C + 16 * C / D)


def kept_bytes(model: ModelSpec, tensor: int, own_tokens: Num, dtype: str) -> Num:
    """Bytes per token that a linear block keeps for its backward, beside what any block does."""
    of_token = DTYPE_BYTES[dtype] * (4 * model.hidden + 2 * model.heads) / tensor
    return of_token + MASTER_BYTES * state_elements(model, 1, tensor) / own_tokens


def held_bytes(model: ModelSpec, tensor: int, own_tokens: Num, dtype: str) -> Num:
    """Bytes per token in the backward of a block's linear attention, beside activations."""
    C, D = chunk(own_tokens), model.head_size
    sums = GRAD_BYTES * (7 + 2 * C / D + 3 * D / C)
    return model.hidden / tensor * (sums + 4 * DTYPE_BYTES[dtype])
