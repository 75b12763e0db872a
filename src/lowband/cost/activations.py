"""Bytes of activations that one rank keeps from forward to backward, in closed form, 16-bit.

Per token and block, with h hidden, q width of queries, k of keys (and of values), o of attention's output,
f MLP width, a heads, T sequence length (q = o = h unless heads have a width of their own):

    norm inputs 2h + 2h   qkv input 2h   qkv output 2(q + 2k)   attention output 2o   up input 2h
    outputs that are normed, too: 2h + 2h; where attention and MLP have the same input: one norm, one input
    of a latent: its vectors before and after their norms, and the keys' shared part
    MLP: 2f of each of up (and gate), the activation function's output, and (gated) their product; of a gated
    one the stack may compute again the activation function, and the product
    plain attention: 5 a T (softmax, dropout mask, dropout output); fused attention: 4a (log-sum-exp); in a
    linear layer neither, but what cost/linear.py counts: bytes are of the mean block
    experts, in place of an MLP: 4h + 12 E of a router; shared experts as an MLP; for each pair of a token and
    an expert 2I of each of up (and gate), and what `_on_the_way` counts: 2h of each row that comes to a rank,
    and of each output whose weight is known only behind it; places and weights
    dropout masks: h + h

With biases and dropout this is the 34 h + 5 a T of Korthikanti et al. (arXiv 2205.05198), section 4. Tensor
parallelism divides the activations between its two exchanges; sequence parallelism also divides the others.
There attention and MLP first gather their inputs: 2h (1 - 1 / ranks) more for each that is kept for the
backward, nothing if the backward gathers them again, as Megatron-LM's does (section 4.2.2).
Recomputation keeps: full - a block's input; selective - all but plain attention's 5 a T; op - a block's
input, attention's output and every other matrix product's output, as torchtitan's selective `op` policy does;
host - nothing on the device, where the backward fetches a block's activations one block at a time. As every
tensor that autograd saves is copied, attention's output, which is its own and the next product's input, is
twice: 2o more.
"""

from dataclasses import dataclass

from lowband.cost.experts import hit
from lowband.cost.lora import Lora
from lowband.cost.numbers import Num
from lowband.spec.axes import ONLY_DATA, Ways
from lowband.spec.mesh import SELF, WORLD, Levels
from lowband.spec.model import ModelSpec
from lowband.spec.step import Attention, Recompute
from lowband.spec.wire import DTYPE_BYTES

HALF, FP32 = 2, 4  # bytes of a value
PLACE, WEIGHT = 8, 4  # of a row among others, int64; of a pair of a token and an expert, fp32

# Per logit at the loss: 16-bit logits, their fp32 copy, log-softmax's output and the fp32 gradient (PyTorch's
# cross entropy on a 16-bit head's output, not compiled).
LOGIT_BYTES = 2 + 4 + 4 + 4


def loss_bytes(model: ModelSpec, tokens: Num, chunks: int = 1, logit: float = LOGIT_BYTES) -> Num:
    """At the loss, of logits and what follows from them; in several pieces of one, and of gradients that the
    forward makes: the weight's, summed in fp32, a piece's of it, and the head input's (model/loss.py).

    logit: bytes of each
    """
    if chunks == 1:
        return logit * tokens * model.vocab
    of_weight = (4 + HALF) * model.vocab * model.hidden
    return logit * -(-tokens // chunks) * model.vocab + of_weight + HALF * tokens * model.hidden


@dataclass(frozen=True)
class Kept:
    """Bytes per token. block: kept by each block; working: added by the block that is being recomputed, or
    whose activations are back from the host; host: that each block keeps there."""

    block: Num
    working: Num
    host: Num = 0.0


def kept_bytes_per_token(
    model: ModelSpec,
    seq_len: Num,
    recompute: Recompute,
    attention: Attention,
    axes: Ways = ONLY_DATA,
    dropout: bool = False,
    gathered: float = 0,
    context: Num = 0,
    load: float = 1.0,
    gated_kept: int = 4,
    of_experts: Levels | None = None,
    lora: Lora | None = None,
) -> Kept:
    """Bytes of activations per token and rank, by the module's formulas.

    gathered: inputs of a block that sequence parallelism gathers and the backward finds, 0 to 2
    context:  bytes that attention between ranks along context keeps besides (cost/context_load.py), and
              linear attention (cost/linear.py)
    load:     of experts, rows of the fullest rank's as a multiple of the mean
    gated_kept: vectors of a gated MLP's width that are kept, of the 4 that it has
    of_experts: levels as ranks with different experts see them; None: one
    lora: adapters, beside which all else is frozen (cost/lora.py)
    """
    h, k, heads = model.hidden, model.kv_hidden, model.heads
    q, o, f = model.query_hidden, model.out_hidden, model.mlp_width * model.dense_share
    tensor, outside = axes.tensor, axes.outside
    between = HALF * (q + 2 * k) + HALF * o + HALF * f * (gated_kept if model.gated else 2)
    replicated: float = HALF * _beside(model) + (2 * h if dropout else 0)
    core: Num = (5 * heads * seq_len if attention == "plain" else 4 * heads) / tensor
    core = core * (1 - model.linear_layers / model.layers)
    outputs = HALF * (o + q + k + f) / tensor
    if model.experts is not None:  # of which only attention is cut
        width, rows, gathered = model.expert_width, load * model.top_k, min(gathered, 1)
        routed_bytes = rows * HALF * (2 if model.gated else 1) * width + 4 * h + 12 * model.experts
        routed_bytes += HALF * (gated_kept if model.gated else 2) * width * model.shared_experts
        routed_bytes -= HALF * h if axes.expert > 1 and not model.shared_experts else 0
        routed_bytes += _on_the_way(model, axes, load, of_experts or Levels.fit({}, axes.expert))
        routed = 1 - model.dense_share
        replicated += routed * routed_bytes
        outputs += routed * HALF * width * (rows + model.shared_experts) / outside
    everything = replicated / outside + between / tensor + core + gathered * HALF * h * (1 - 1 / outside)
    everything = everything + context
    if lora is not None:
        everything = everything + lora.kept_more(model, attention, gated_kept)
    block_input = HALF * h / outside
    if recompute == "none":
        block: Num = everything
    elif recompute == "selective":
        block = everything - (core if attention == "plain" else 0)
    elif recompute == "op":
        block = block_input + outputs + HALF * h / outside
    elif recompute == "host":
        return Kept(0.0, everything, everything + HALF * o / tensor)
    else:
        block = block_input
    return Kept(block, everything - block)


def to_host_bytes(model: ModelSpec, sequences: int, seq_len: int, dtype: str) -> int:
    """Bytes of a micro-batch that a block of our GPT copies to the host, as on a CPU: of values that norms,
    products and attention take, of attention's output twice, of four statistics and log-sum-exps in fp32, and
    of rotary angles. (On a GPU statistics are fp32, too, and kernels keep seeds.)
    """
    h, f, tokens = model.hidden, model.mlp_width, sequences * seq_len
    angles = 4 * seq_len * model.head_size if model.positions == "rotary" else 0
    return DTYPE_BYTES[dtype] * tokens * (9 * h + 2 * f + 4) + FP32 * (tokens * model.heads + angles)


def _beside(model: ModelSpec) -> int:
    """Values of a token in a block that ranks along tensor divide only by tokens: inputs of norms, of
    attention's products and the MLP's, and a latent's vectors."""
    latent = model.latent
    norms = (1 if model.parallel_block else 2) + (2 if model.post_norms else 0)
    inputs = 1 if model.parallel_block else 2
    short = 0 if latent is None else 2 * (latent.kv_rank + (latent.q_rank or 0)) + latent.rope
    return (norms + inputs) * model.hidden + short


def _on_the_way(model: ModelSpec, axes: Ways, load: float, levels: Levels) -> float:
    """Bytes per token that ways to experts and back keep (engine.parallel.dispatch), with k of E experts.

    flat, hops  of a pair 2h of its output, its weight and three places; where it comes, 2h of its row; in
                each further hop and at its expert two places
    merged      of a hop a place of each pair and row; at the end 2h of a row, and of a pair a weight and four
                places
    in parts    of a pair a place more
    """
    pairs, experts, half_row = model.top_k, model.experts or 1, HALF * model.hidden
    in_turns = int(axes.route_parts > 1)
    hops = [hop.count for hop in levels.hops(SELF, WORLD)[::-1]]
    if axes.route != "merged" or not hops:
        of_hops = min(len(hops), 1) if axes.route == "flat" else len(hops)
        arrived = load * of_hops * 2 * PLACE + (load * half_row if hops else 0)
        return pairs * (half_row + WEIGHT + (3 + in_turns) * PLACE + arrived)
    total, groups, rows = 0.0, 1, 0.0
    for i, count in enumerate(hops):
        groups *= count
        rows = groups * float(hit(experts, pairs, groups))
        total += (load if i else 1) * PLACE * (pairs + rows)
    return total + pairs * in_turns * PLACE + load * (rows * half_row + pairs * (WEIGHT + 4 * PLACE))
