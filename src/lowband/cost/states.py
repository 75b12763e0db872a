"""Bytes that a rank sends in a step for states of linear layers along context, in closed form.

A state has s = sequences x heads x D x (D + 1) values in fp32, D the head size, for any number of tokens.
Of n ranks, in groups of c_1 inside groups of c_2 and so on, per layer and micro-batch, forward, and the same
backward:

    pass     s (n - 1) / n in the mean over ranks: all but the last one send it once
    gather   s (n - 1), of which s (c_L - 1) over the outermost of L levels
    scan     over level i s (c_i - 1) / (c_1 .. c_{i-1}), and inwards, but over the outermost, once more
             that / c_i; s rounded up to a multiple of c_1 .. c_{L-1}

Over the outermost level scan sends as many times fewer than gather as a group inside it has ranks.
A block that is recomputed runs its forward's exchanges again.

Source: LASP (arXiv 2404.02882), LASP-2 (arXiv 2502.07563); scan is ours.
"""

from collections import defaultdict
from fractions import Fraction
from math import prod

from lowband.cost.context import by_level
from lowband.cost.memory import MASTER_BYTES
from lowband.spec.activations import CONTEXT_STATE_GATHER, CONTEXT_STATES
from lowband.spec.context import Layout
from lowband.spec.mesh import SELF, WORLD, Levels
from lowband.spec.model import ModelSpec
from lowband.spec.records import mean
from lowband.spec.run import RunSpec
from lowband.spec.step import States


def state_elements(model: ModelSpec, micro_batch: int, tensor: int = 1) -> int:
    """Values of one layer's state on a rank, with the column of the normalizer."""
    width = model.head_size
    return micro_batch * model.heads // tensor * width * (width + 1)


def sent_by_level(states: States, elements: int, levels: Levels) -> dict[str, Fraction]:
    """Values that a rank sends over each level so that each gets the sum of states before it.

    levels: as the ranks along context see them. The mean over ranks
    """
    hops = levels.hops(SELF, WORLD)
    if states == "gather":
        return dict(by_level(CONTEXT_STATE_GATHER, Fraction(elements * levels.world), levels))
    if states == "pass":
        return {level: Fraction(elements * sends, levels.world) for level, sends in sends_in_turn(levels)}
    sent = {hop.level: Fraction(0) for hop in hops}
    parts = prod(hop.count for hop in hops[:-1])
    part = Fraction(-(-elements // parts) * parts)
    for hop in hops:
        sent[hop.level] += (hop.count - 1) * part
        part /= hop.count
        if hop is not hops[-1]:
            sent[hop.level] += (hop.count - 1) * part
    return sent


def sends_in_turn(levels: Levels) -> list[tuple[str, int]]:
    """By level, how many of the messages from each rank to the next one cross it, inner to outer."""
    outside, found = levels.world, []
    for hop in levels.hops(SELF, WORLD):
        outside //= hop.count
        found.append((hop.level, (hop.count - 1) * outside))
    return found


def states_bytes(spec: RunSpec) -> dict[tuple[str, str, str], int | float]:
    """Bytes sent per rank in one optimizer step: (level, collective, wire) -> bytes, the mean over ranks."""
    return sent_as_states(
        spec.model, spec.layout, spec.tensor, spec.micro_batch, spec.accumulation, spec.recompute == "full"
    )


def sent_as_states(
    model: ModelSpec, layout: Layout, tensor: int, micro_batch: int, accumulation: int, is_recomputed: bool
) -> dict[tuple[str, str, str], int | float]:
    """The same by its terms."""
    layers, states = model.linear_layers, layout.travels
    if states is None or not layers:
        return {}
    counts: defaultdict[tuple[str, str, str], Fraction] = defaultdict(Fraction)
    elements = state_elements(model, micro_batch, tensor)
    forward, backward = CONTEXT_STATES[states]
    runs = 2 * layers if is_recomputed else layers  # of a block's forward
    for level, sent in sent_by_level(states, elements, layout.levels).items():
        for row, times in ((forward, runs), (backward, layers)):
            counts[level, row.name, "native"] += sent * MASTER_BYTES * times * accumulation
    return {key: mean(sent.numerator, sent.denominator) for key, sent in counts.items()}
