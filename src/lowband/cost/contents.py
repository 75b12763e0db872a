"""What other axes' rows carry, and the bytes of it that a rank sends in a step, in closed form.

X are a micro-batch's activations, sequences x tokens x hidden. Per micro-batch, a GPT of L blocks has along
the tensor axis

    plain      2 L + 1 all-reduces of X forward (the embedding's too), 2 L + 1 backward (the head's too)
    sequence   2 L + 1 gathers and 2 L reductions of X forward, 2 L + 1 reductions and 2 L gathers backward;
               1 all-reduce behind the embedding, and 1 gather backward where the tokens are split
    both       1 gather of three numbers a token, for the loss

Of n ranks, each sends X (n - 1) / n in a gather or reduction, and twice that in an all-reduce. A block that
is recomputed runs its forward's exchanges again, but for the last, behind which nothing is kept.

Source: Megatron-LM (arXiv 1909.08053, section 3; arXiv 2205.05198, section 4.2.2).
"""

from collections import Counter, defaultdict
from collections.abc import Mapping
from fractions import Fraction
from math import prod

from lowband.cost.bytes import NORM_BYTES, sent_bytes, unit_numels
from lowband.cost.context import by_level, context_bytes
from lowband.cost.memory import MASTER_BYTES
from lowband.cost.stages import stages_bytes
from lowband.cost.states import states_bytes
from lowband.spec.activations import (
    ENTER_GATHER,
    ENTER_REDUCE,
    ENTER_SCATTER,
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
from lowband.spec.wire import DTYPE_BYTES

LOSS_NUMBERS = 3  # of each token: the largest logit, the sum of exponentials, the target's logit


def activations(model: ModelSpec, micro_batch: int, seq_len: int) -> int:
    """Elements of one micro-batch between two layers."""
    return micro_batch * seq_len * model.hidden


def shared_elements(model: ModelSpec) -> int:
    """Parameters of which, with sequence parallelism, every tensor rank has a partial gradient."""
    rows = ("attention.out.bias", "mlp.down.bias")

    def of(shapes: Mapping[str, tuple[int, ...]]) -> int:
        return sum(prod(shape) for name, shape in shapes.items() if "norm" in name or name in rows)

    return of(model.root_shapes()) + model.layers * of(model.block_shapes())


def exchanges(model: ModelSpec, axes: Axes, recompute: bool) -> Counter[Collective]:
    """How often a micro-batch runs each row along the tensor axis."""
    if axes.tensor == 1:
        return Counter()
    layers, again = model.layers, model.layers if recompute else 0
    if not axes.sequence_parallel:
        return Counter({LEAVE_REDUCE: 2 * layers + 1 + again, ENTER_REDUCE: 2 * layers + 1, LOSS_GATHER: 1})
    return Counter(
        {
            LEAVE_REDUCE: 1, SPLIT_GATHER: 1,
            ENTER_GATHER: 2 * layers + 1 + 2 * again, ENTER_SCATTER: 2 * layers + 1,
            LEAVE_SCATTER: 2 * layers + again, LEAVE_GATHER: 2 * layers,
            LOSS_GATHER: 1,
        }
    )  # fmt: skip


def tensor_bytes(
    model: ModelSpec,
    levels: Levels,
    optim_ranks: int,
    axes: Axes,
    micro_batch: int,
    seq_len: int,
    accumulation: int,
    compute_dtype: str,
    is_clipped: bool,
    recompute: bool = False,
) -> dict[tuple[str, str, str], int | float]:
    """Bytes sent per rank in one optimizer step along the tensor axis: (level, collective, wire) -> bytes.

    levels:      as the ranks along the tensor axis see them
    optim_ranks: among which the optimizer's shards are divided
    The mean over ranks, where hidden is a multiple of the tensor ranks: shards of few parameters differ.
    """
    counts: defaultdict[tuple[str, str, str], Fraction] = defaultdict(Fraction)

    def add(row: Collective, whole: int | Fraction, times: int) -> None:
        for level, sent in by_level(row, Fraction(whole), levels):
            counts[level, row.name, "native"] += sent * times

    tokens, width = micro_batch * seq_len, DTYPE_BYTES[compute_dtype]
    for row, times in exchanges(model, axes, recompute).items():
        of_loss = LOSS_NUMBERS * MASTER_BYTES * tokens * axes.tensor
        of_others = width * activations(model, micro_batch, seq_len)
        add(row, of_loss if row is LOSS_GATHER else of_others, times * accumulation)
    if axes.tensor > 1 and axes.sequence_parallel:
        add(SHARED_REDUCE, Fraction(MASTER_BYTES * shared_elements(model), optim_ranks), 1)
    if axes.tensor > 1 and is_clipped:
        add(TENSOR_NORM, NORM_BYTES * axes.tensor, 1)
    return {key: mean(sent.numerator, sent.denominator) for key, sent in counts.items()}


def step_bytes(spec: RunSpec) -> dict[tuple[str, str, str], int | float]:
    """Bytes sent per rank in one optimizer step of a run, along all its axes; the mean over ranks."""
    levels, axes = spec.levels, Axes(tensor=spec.tensor, sequence_parallel=spec.sequence_parallel)
    is_clipped = spec.device != "fake"  # fake tensors have no values to clip
    along_tensor = tensor_bytes(
        spec.model,
        spec.mesh.levels("tensor"),
        levels.size(spec.scheme.optim),
        axes,
        spec.micro_batch,
        spec.seq_len // spec.context,
        spec.accumulation,
        spec.compute_dtype,
        is_clipped,
        recompute=spec.recompute == "full",
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
    return {**along_data, **along_tensor, **context_bytes(spec), **states_bytes(spec)}


def _along_all(
    spec: RunSpec, along_tensor: Mapping[tuple[str, str, str], int | float]
) -> dict[tuple[str, str, str], int | float]:
    """Of a pipeline: along tensor and context, each rank exchanges for its own layers; it takes part in each
    norm."""
    counts = defaultdict(Fraction, stages_bytes(spec))
    for key, of_rank in (*along_tensor.items(), *context_bytes(spec).items(), *states_bytes(spec).items()):
        counts[key] += Fraction(of_rank) / (1 if key[1] == TENSOR_NORM.name else spec.pipeline)
    norms = by_level(STAGES_NORM, Fraction(NORM_BYTES * spec.pipeline), spec.mesh.levels("pipeline"))
    for level, sent in norms:
        counts[level, STAGES_NORM.name, "native"] += sent
    return {key: mean(sent.numerator, sent.denominator) for key, sent in counts.items()}
