"""Seconds that one rank computes: matrix products, attention, memory-bound work, kernels' fixed time.

    products   FLOPs / (peak x matmul efficiency)
    attention  FLOPs / (peak x attention efficiency); a fused kernel skips what causality masks (half); the
               plain one's products take at least as long as writing and reading the scores
    memory     bytes read and written / (memory rate x memory efficiency)
    kernels    number x fixed time

Bytes of a block's forward per token, 16-bit, with h, k, f, a, T as in cost/activations.py: two norms 8h; two
additions to the residual 12h (14h with dropout); qkv split 4(h + 2k); activation function 4f (gated 8f, 6f
where it is one kernel with its product: two inputs read, one output written); norms of outputs
8h, of queries and keys 4(h + k); one norm 4h where attention and MLP have the same input. Operation by
operation (`single`) a norm moves 36 in place of 4: to fp32 6, square 8, mean 4, product 8, to 16 bits 6,
weight 4 (RMSNorm as torch 2.4 to 2.6 compose it), and rotary embeddings 20(h + k): to fp32 6, complex
product 8, to 16 bits 6. Further:
plain attention 9 a T (softmax 4, dropout 5) beside the 4 a T with which its products write and read the
scores. The backward of these moves twice as much.
In a linear layer cost/linear.py stands for attention; times are of the mean block, of both kinds.
Of experts, all that a token meets, I wide, stand for f; the fullest rank's have `load` times the mean rows.
Their products take at least as long as to read the weights of a rank's experts: with few rows each, that is
what they wait for. A pair's row is sorted by expert, and its output put back: 8h. Ranks along tensor divide
none of it, but, with sequence parallelism, the tokens.
Where ranks along context add up the outputs of several blocks of keys, the sums, fp32, are read and written
and the block's output read for each: 10 bytes a value, and 15 kernels.
The loss moves 24 bytes per logit: 16-bit to fp32, softmax, gradient. Adam moves 34 bytes per parameter: the
gradient twice (norm, step), master weights and two moments in and out, 16-bit weights out.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import prod

import numpy as np

from lowband.cost import linear as of_linear
from lowband.cost.activations import HALF
from lowband.cost.collectives import Case, seconds, share
from lowband.cost.flops import (
    BACKWARD_MATMUL,
    attention_flops_per_token,
    block_matmul_flops_per_token,
    expert_elements,
    head_flops_per_token,
    uncut_flops_per_token,
)
from lowband.cost.lora import KERNELS as ADAPTER_KERNELS
from lowband.cost.lora import Lora
from lowband.cost.memory import ADAM_MOMENT_BYTES
from lowband.cost.numbers import GIGA, Num
from lowband.errors import UserError
from lowband.spec.axes import ONLY_DATA, Ways
from lowband.spec.machine import Machine
from lowband.spec.model import ModelSpec
from lowband.spec.step import Attention, Operations, Products, Recompute

LOSS_BYTES = 24
ADAM_BYTES = 34
NEWTON_SCHULZ = 5  # iterations with which Muon makes a matrix orthogonal (Jordan et al., 2024)
# Of an exchange between replicas, per fp32 value: a replica's piece (difference, new anchor, new weights),
# and the outer optimizer's part (mean; with momentum its update too).
ANCHOR_BYTES, MEAN_BYTES, MOMENTUM_BYTES = 12 + 12 + 8, 8, 48
KERNELS = {"flash": 12, "plain": 18}  # in a block's forward, without fusion
MERGED_BYTES, MERGED_KERNELS = 4 + 4 + 2, 15
# Per value: of a norm; of rotary embeddings, which one kernel does with the split of queries and keys.
NORM_BYTES: dict[Operations, int] = {"fused": 4, "norms": 4, "single": 6 + 8 + 4 + 8 + 6 + 4}
ROTARY_BYTES: dict[Operations, int] = {"fused": 0, "norms": 6 + 8 + 6, "single": 6 + 8 + 6}
BACKWARD_ATTENTION = {
    "flash": 2.5,
    "plain": 2.0,
}  # FlashAttention-2 (arXiv 2307.08691): five products for the forward's two
BACKWARD_MEMORY = 2
# A factor of a product in 8 bits, from 16: its greatest value is sought, then it is written, once for each of
# the two products that read it by rows and by columns; in mxfp8 every 32 values have theirs, in either order.
CAST_BYTES = {"bf16": 0, "fp8": 2 + 2 + 2, "mxfp8": 2 + 2 * (1 + 1 / 32)}
QUANTIZED_BYTES = 2 + 1  # a value read in 16 bits and its code written, or the other way round


@dataclass(frozen=True)
class Computer:
    """A device, as input to the formulas."""

    machine: Machine
    dtype: str
    case: Case = "value"
    products: Products = "bf16"

    def _peak(self, dtype: str) -> float:
        peak = self.machine.device.peak_tflops.get(dtype)
        if peak is None:
            raise UserError(
                f"device.peak_tflops has no {dtype}",
                where=f"machine '{self.machine.name}'",
                allowed=f"peak_tflops: {{{dtype}: 10^12 FLOP/s}}",
            )
        return peak * 1e12

    def matmul_s(self, flops: Num, dtype: str | None = None) -> Num:
        """dtype: another than that of everything else"""
        peak = self._peak(dtype or self.dtype)
        return flops / (peak * share(self.machine.device.matmul_efficiency, self.case))

    def block_s(self, flops: Num) -> Num:
        """Of a block's matrices."""
        return self.matmul_s(flops, None if self.products == "bf16" else "fp8")

    def casts_s(self, values: Num) -> Num:
        """Of values that become factors of such products."""
        return self.memory_s(CAST_BYTES[self.products] * values)

    def attention_s(self, flops: Num, kind: Attention) -> Num:
        """Seconds of attention. flops: not halved for causality."""
        device = self.machine.device
        if kind == "plain" or device.attention_efficiency is None:
            return self.matmul_s(flops / (2 if kind == "flash" else 1))
        return flops / 2 / (self._peak(self.dtype) * share(device.attention_efficiency, self.case))

    def memory_s(self, moved: Num) -> Num:
        device = self.machine.device
        if device.memory_gigabytes_per_s is None:
            return 0 * moved
        rate = share(device.memory_gigabytes_per_s, self.case) * GIGA
        return moved / (rate * share(device.memory_efficiency, self.case))

    def kernels_s(self, count: float) -> float:
        return count * seconds(self.machine.device.kernel_us, self.case)

    def quantize_s(self, values: Num) -> Num:
        return self.memory_s(QUANTIZED_BYTES * values)

    def adam_s(self, parameters: Num, moments: float = ADAM_MOMENT_BYTES) -> Num:
        """moments: bytes of a parameter's, which an update reads and writes"""
        return self.memory_s((ADAM_BYTES + 2 * (moments - ADAM_MOMENT_BYTES)) * parameters)

    def outer_s(self, piece: Num, part: Num, has_momentum: bool) -> Num:
        """Computation of one exchange. piece, part: values of the anchor and of the momentum on a rank"""
        return self.memory_s(ANCHOR_BYTES * piece + (MEAN_BYTES + MOMENTUM_BYTES * has_momentum) * part)


def muon_flops(model: ModelSpec) -> float:
    """FLOPs of Muon's update of all blocks, on all ranks together: of a matrix of m x n, m <= n, in each
    iteration two products of m x m x n and one of m x m x m."""
    found = 0.0
    for count, is_dense in ((model.dense_layers, True), (model.layers - model.dense_layers, False)):
        for name, shape in model.block_shapes(is_dense).items():
            if len(shape) > 1 and not name.endswith(".bias"):
                (m, n), many = sorted(shape[-2:]), prod(shape[:-2])
                found += count * many * NEWTON_SCHULZ * (4 * m * m * n + 2 * m**3)
    return found


@dataclass(frozen=True)
class Work:
    """Seconds of one micro-batch in one block, and in the head (final norm, output layer, loss).
    Where some layers are linear, in the mean block.

    weight, head_weight: of the backward, what a pipeline may put off: the products that are gradients of
                         weights
    experts: of the forward, products of the experts that tokens choose
    attention: of the forward, softmax attention's products; attention_backward: of the backward
    linear, linear_backward: in a linear layer, behind which its states travel
    """

    forward: Num
    backward: Num
    weight: Num
    experts: Num
    attention: Num
    attention_backward: Num
    linear: Num
    linear_backward: Num
    recompute: Num
    head_forward: Num
    head_backward: Num
    head_weight: Num


def work(
    computer: Computer,
    model: ModelSpec,
    micro_batch: Num,
    seq_len: Num,
    recompute: Recompute,
    attention: Attention,
    axes: Ways = ONLY_DATA,
    dropout: bool = False,
    attended: Sequence[Fraction] = (Fraction(1),),
    merges: int = 0,
    load: float = 1.0,
    recomputed: float = 1.0,
    lora: Lora | None = None,
    gated_kept: int = 4,
    weight_casts: Num = 1.0,
    operations: Operations = "fused",
) -> Work:
    """Computation of one micro-batch of `micro_batch` sequences on one of the tensor and context ranks.

    attended, merges: of attention between ranks along context, as cost.context_load has them
    load: of experts, rows of the fullest rank's as a multiple of the mean
    recomputed: share of the blocks that `recompute` is about; the others keep everything
    lora: adapters, beside which all else is frozen
    gated_kept: vectors of a gated MLP's width that are kept; less than 4: by a fused activation function
    weight_casts: share of the micro-batches in which weights become factors in 8 bits
    operations: which of them are one kernel
    """
    tokens = micro_batch * (seq_len // axes.context)
    h, k, q, tensor = model.hidden, model.kv_hidden, model.query_hidden, axes.tensor
    f = model.mlp_width * model.dense_share
    linear = model.linear_layers / model.layers  # shares of the blocks
    softmax = 1 - linear
    experts = _experts_s(computer, model, tokens, axes, load)
    products = _products_s(computer, model, tokens, axes) + experts
    mine = float(sum(attended))
    core = mine * computer.attention_s(tokens * attention_flops_per_token(model, seq_len) / tensor, attention)
    scores: Num = 0.0
    if attention == "plain":
        one = mine * computer.memory_s(tokens * model.heads * seq_len / tensor)  # a byte of each score
        core, scores = np.maximum(core, 4 * one), 9 * one
    per_width = (8 if gated_kept == 4 else 6) if model.gated else 4
    norm, rotary = NORM_BYTES[operations], ROTARY_BYTES[operations] * (model.positions == "rotary")
    turned = model.rotated * (
        model.heads + (1 if model.latent else k // model.rotated)
    )  # a latent's key once
    inside = (4 * (q + 2 * k) + norm * model.qk_norm * (q + k) + rotary * turned + per_width * f) / tensor
    merged = softmax * merges
    norms = (1 if model.parallel_block else 2) + (2 if model.post_norms else 0)
    outside = (norm * norms + (14 if dropout else 12)) * h / axes.outside
    moved = outside + inside + merged * MERGED_BYTES * h / tensor
    if model.experts is not None:
        rows = load * model.top_k
        routed = per_width * model.expert_width * (rows + model.shared_experts) + 8 * h * rows
        moved = moved + (1 - model.dense_share) * routed / axes.outside
    rest = computer.memory_s(tokens * moved)
    kernels = computer.kernels_s(softmax * KERNELS[attention] + merged * MERGED_KERNELS)
    states: Num = 0.0
    states_back: Num = 0.0
    behind: Num = 0.0
    behind_back: Num = 0.0
    if linear:
        own = model, tensor, seq_len // axes.context
        states, states_back, behind, behind_back = (
            computer.matmul_s(micro_batch * flops) for flops in vars(of_linear.products(*own)).values()
        )
        rest = rest + linear * computer.memory_s(micro_batch * of_linear.moved_bytes(*own))
        kernels = kernels + linear * computer.kernels_s(of_linear.KERNELS)
    casts, casts_back = (
        computer.casts_s(values) for values in _cast(model, tokens, axes, load, weight_casts)
    )
    adapters = 0.0 if lora is None else _adapters_s(computer, model, lora, tokens)
    forward = products + softmax * core + softmax * scores + linear * states + rest + kernels + adapters
    again: dict[str, Num] = {
        "none": 0.0,
        "host": 0.0,
        "selective": softmax * (core + scores) if attention == "plain" else 0.0,
        "op": products / 2 + rest,
        "full": forward,
    }
    head = computer.matmul_s(tokens * head_flops_per_token(model) / tensor)
    loss = computer.memory_s(tokens * LOSS_BYTES * model.vocab / tensor)
    back = BACKWARD_MATMUL if lora is None else 1  # of frozen matrices, the input's gradient alone
    return Work(
        forward=forward + casts,
        backward=back * products
        + BACKWARD_MATMUL * adapters
        + casts_back
        + softmax * BACKWARD_ATTENTION[attention] * core
        + linear * states_back
        + BACKWARD_MEMORY * (softmax * scores + rest + kernels),
        weight=products if lora is None else adapters,
        experts=experts,
        attention=core,
        attention_backward=BACKWARD_ATTENTION[attention] * core,
        linear=behind,
        linear_backward=behind_back,
        recompute=recomputed * (again[recompute] + (recompute in ("op", "full")) * casts),
        head_forward=head + loss / 3,
        head_backward=back * head + 2 * loss / 3,
        head_weight=(back - 1) * head,
    )


def _adapters_s(computer: Computer, model: ModelSpec, lora: Lora, tokens: Num) -> Num:
    """Of a block's adapters, forward. So narrow, their products mostly wait for memory."""
    products, rest = (computer.memory_s(tokens * moved) for moved in lora.moved(model))
    flops = computer.block_s(tokens * 2 * lora.parameters(model))
    return np.maximum(flops, products) + rest + computer.kernels_s(ADAPTER_KERNELS * len(lora.on))


def _cast(model: ModelSpec, tokens: Num, axes: Ways, load: float, often: Num) -> tuple[Num, Num]:
    """Values of a block that become factors of its products: in its forward inputs and weights, in its
    backward gradients of outputs and weights once more. often: share of the passes in which weights do"""
    f = model.mlp_width * model.dense_share
    routed = (1 - model.dense_share) * (load * model.top_k + model.shared_experts)
    wide = model.expert_width * routed / axes.outside
    h, q, k, o, tensor = model.hidden, model.query_hidden, model.kv_hidden, model.out_hidden, axes.tensor
    inputs = 2 * h + (o + f) / tensor + wide
    outputs = 2 * h + (q + 2 * k + (2 if model.gated else 1) * f) / tensor + (2 if model.gated else 1) * wide
    beside, met = uncut_flops_per_token(model)
    held = 0.0  # by a rank of experts, however few a token meets
    if model.experts is not None:
        held = (1 - model.dense_share) * expert_elements(model) * (model.experts / axes.expert)
    cut = block_matmul_flops_per_token(model) - beside - met
    weights = often * (cut / 2 / tensor + beside / 2 + held)
    return tokens * inputs + weights, tokens * outputs + weights


def _products_s(computer: Computer, model: ModelSpec, tokens: Num, axes: Ways) -> Num:
    """Of a block's matrices but experts', forward."""
    beside, met = uncut_flops_per_token(model)
    cut = block_matmul_flops_per_token(model) - beside - met
    return computer.block_s(tokens * (cut / axes.tensor + beside / axes.outside))


def _experts_s(computer: Computer, model: ModelSpec, tokens: Num, axes: Ways, load: float) -> Num:
    if model.experts is None:
        return 0.0
    _, met = uncut_flops_per_token(model)
    read = computer.memory_s(HALF * expert_elements(model) * (model.experts / axes.expert))
    share = 1 - model.dense_share
    return np.maximum(computer.block_s(load * tokens * met / axes.outside), share * read)
