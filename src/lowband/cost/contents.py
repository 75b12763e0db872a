"""What other axes' rows carry, and the bytes of it that a rank sends in a step, in closed form.

X are a micro-batch's activations, sequences x tokens x hidden. Per micro-batch, a GPT of L blocks has along
the tensor axis

    plain      2 L + 1 all-reduces of X forward (the embedding's too), 2 L + 1 backward (the head's too)
    sequence   2 L + 1 gathers and 2 L reductions of X forward, 2 L + 1 reductions and 2 L gathers backward;
               1 all-reduce behind the embedding, and 1 gather backward where the tokens are split
    both       1 gather of three numbers a token, for the loss

With experts, which are whole on every tensor rank, only attention is cut: L where 2 L stands. What enters
attention with a latent are its short vectors in place of X.

Of n ranks, each sends X (n - 1) / n in a gather or reduction, and twice that in an all-reduce. A block that
is recomputed runs its forward's exchanges again, but for the last, behind which nothing is kept.

Source: Megatron-LM (arXiv 1909.08053, section 3; arXiv 2205.05198, section 4.2.2).
"""

from collections import defaultdict
from collections.abc import Mapping
from fractions import Fraction
from math import prod

from lowband.cost.activations import to_host_bytes
from lowband.cost.bytes import NORM_BYTES, expert_numels, sent_bytes, unit_numels
from lowband.cost.context import by_level, context_bytes
from lowband.cost.experts import experts_bytes
from lowband.cost.memory import MASTER_BYTES
from lowband.cost.stages import stages_bytes
from lowband.cost.states import states_bytes
from lowband.spec.activations import (
    ENTER_GATHER,
    ENTER_REDUCE,
    ENTER_SCATTER,
    KEPT,
    LEAVE_GATHER,
    LEAVE_REDUCE,
    LEAVE_SCATTER,
    LOSS_GATHER,
    SHARED_REDUCE,
    SPLIT_GATHER,
    STAGES_NORM,
    TENSOR_NORM,
)
from lowband.spec.axes import Axes
from lowband.spec.mesh import Levels
from lowband.spec.model import ModelSpec
from lowband.spec.records import mean
from lowband.spec.run import RunSpec
from lowband.spec.step import Collective
from lowband.spec.tiers import HOST
from lowband.spec.wire import DTYPE_BYTES

LOSS_NUMBERS = 3  # of each token: the largest logit, the sum of exponentials, the target's logit


def shared_elements(model: ModelSpec, expert: int = 1) -> tuple[int, int]:
    """Parameters of which, with sequence parallelism, every tensor rank has a partial gradient; and those of
    its experts, where ranks have different ones.

    expert: ranks that divide experts
    """
    rows = ("attention.out.bias", "mlp.down.bias")
    whole = ("attention.q_down.", "attention.kv_down.")  # a latent's
    of_experts = model.expert_shapes() if expert > 1 else {}
    mixed = model.experts is not None

    def is_shared(name: str) -> bool:
        return "norm" in name or name in rows or name.startswith(whole) or (mixed and name.startswith("mlp."))

    def of(shapes: Mapping[str, tuple[int, ...]]) -> int:
        return sum(prod(shape) for name, shape in shapes.items() if is_shared(name))

    apart = sum(prod(shape) for name, shape in of_experts.items() if ".experts." in name)
    everywhere = of(model.root_shapes()) + model.layers * (of(model.block_shapes()) - apart)
    return everywhere, model.layers * apart // expert


def exchanged(model: ModelSpec, axes: Axes, recomputed: int) -> dict[Collective, int]:
    """Features of each token that a micro-batch's rows along the tensor axis carry, over all layers.

    recomputed: how many of these run their forward twice
    """
    if axes.tensor == 1:
        return {}
    h, layers = model.hidden, model.layers
    again = recomputed * h
    mlps = layers * h if model.experts is None else 0
    leaving = layers * h + mlps
    entering = layers * (h if model.latent is None else model.latent.entering(h)) + mlps
    if not axes.sequence_parallel:
        return {LEAVE_REDUCE: leaving + h + again, ENTER_REDUCE: entering + h}
    return {
        LEAVE_REDUCE: h, SPLIT_GATHER: h,
        ENTER_GATHER: entering + h + entering // layers * recomputed, ENTER_SCATTER: entering + h,
        LEAVE_SCATTER: leaving + again, LEAVE_GATHER: leaving,
    }  # fmt: skip


def tensor_bytes(
    model: ModelSpec,
    levels: Levels,
    optim_ranks: tuple[int, int],
    axes: Axes,
    micro_batch: int,
    seq_len: int,
    accumulation: int,
    compute_dtype: str,
    is_clipped: bool,
    recomputed: int = 0,
) -> dict[tuple[str, str, str], int | float]:
    """Bytes sent per rank in one optimizer step along the tensor axis: (level, collective, wire) -> bytes.

    levels:      as the ranks along the tensor axis see them
    optim_ranks: among which the optimizer's shards are divided; and those of experts
    The mean over ranks, where hidden is a multiple of the tensor ranks: shards of few parameters differ.
    """
    counts: defaultdict[tuple[str, str, str], Fraction] = defaultdict(Fraction)

    def add(row: Collective, whole: int | Fraction, times: int) -> None:
        for level, sent in by_level(row, Fraction(whole), levels):
            counts[level, row.name, "native"] += sent * times

    tokens, width = micro_batch * seq_len, DTYPE_BYTES[compute_dtype]
    for row, features in exchanged(model, axes, recomputed).items():
        add(row, width * tokens * features, accumulation)
    if axes.tensor > 1:
        add(LOSS_GATHER, LOSS_NUMBERS * MASTER_BYTES * tokens * axes.tensor, accumulation)
    if axes.tensor > 1 and axes.sequence_parallel:
        shared = zip(shared_elements(model, axes.expert), optim_ranks, strict=True)
        add(SHARED_REDUCE, sum(Fraction(MASTER_BYTES * count, ranks) for count, ranks in shared), 1)
    if axes.tensor > 1 and is_clipped:
        add(TENSOR_NORM, NORM_BYTES * axes.tensor, 1)
    return {key: mean(sent.numerator, sent.denominator) for key, sent in counts.items()}


def step_bytes(spec: RunSpec) -> dict[tuple[str, str, str], int | float]:
    """Bytes sent per rank in one optimizer step of a run, along all its axes; the mean over ranks."""
    levels, alike = spec.levels, spec.levels_alike
    axes = Axes(tensor=spec.tensor, sequence_parallel=spec.sequence_parallel, expert=spec.expert)
    is_clipped = spec.device != "fake"  # fake tensors have no values to clip
    along_tensor = tensor_bytes(
        spec.model,
        spec.mesh.levels("tensor"),
        (levels.size(spec.scheme.optim), alike.size(spec.scheme.optim)),
        axes,
        spec.micro_batch,
        spec.seq_len // spec.context,
        spec.accumulation,
        spec.compute_dtype,
        is_clipped,
        recomputed=len(spec.recomputed) if spec.recompute == "full" else 0,
    )
    if spec.is_in_stages:
        return _along_all(spec, along_tensor)
    along_data = sent_bytes(
        unit_numels(spec.model, levels, axes),
        spec.scheme,
        levels,
        spec.compute_dtype,
        spec.reduce_dtype,
        spec.accumulation,
        is_clipped,
        pattern=spec.collectives,
        order=spec.order,
    )
    found = {**along_data, **along_tensor, **context_bytes(spec), **states_bytes(spec)}
    if spec.recompute == "host":
        block = to_host_bytes(spec.model, spec.micro_batch, spec.seq_len, spec.compute_dtype)
        copied = spec.accumulation * len(spec.recomputed) * block
        found |= {(HOST, row.name, "native"): copied for row in KEPT}
    if spec.model.experts is None:
        return found
    of_experts = sent_bytes(
        expert_numels(spec.model, alike, spec.expert), spec.scheme, alike, spec.compute_dtype,
        spec.reduce_dtype, spec.accumulation, False, pattern=spec.collectives, order=spec.order,
    )  # fmt: skip
    summed = defaultdict(Fraction, {key: Fraction(sent) for key, sent in found.items()})
    for key, sent in (*of_experts.items(), *experts_bytes(spec).items()):
        summed[key] += Fraction(sent)
    return {key: mean(sent.numerator, sent.denominator) for key, sent in summed.items() if sent}


def _along_all(
    spec: RunSpec, along_tensor: Mapping[tuple[str, str, str], int | float]
) -> dict[tuple[str, str, str], int | float]:
    """Of a pipeline: along tensor and context, each rank exchanges for its own layers; it takes part in each
    norm."""
    counts = defaultdict(Fraction, stages_bytes(spec))
    for key, sent in experts_bytes(spec).items():
        counts[key] += sent
    for key, of_rank in (*along_tensor.items(), *context_bytes(spec).items(), *states_bytes(spec).items()):
        counts[key] += Fraction(of_rank) / (1 if key[1] == TENSOR_NORM.name else spec.pipeline)
    norms = by_level(STAGES_NORM, Fraction(NORM_BYTES * spec.pipeline), spec.mesh.levels("pipeline"))
    for level, sent in norms:
        counts[level, STAGES_NORM.name, "native"] += sent
    return {key: mean(sent.numerator, sent.denominator) for key, sent in counts.items()}
