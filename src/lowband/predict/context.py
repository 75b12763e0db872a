"""What a block's passes wait for exchanges between ranks along context, as the engine runs them.

Of a ring of R steps, in step i attention takes a_i seconds, and b_i in the backward; gathering keys and
values g, passing them on p (again in the backward), reducing their gradients s, passing these on d, the heads
of one pass h:

    forward    h + R g + sum over i < R - 1 of (join(g + a_i, p) - g - a_i)
    backward   h + R (g + s) + d + sum over i < R of (join(g + b_i + s, l_i) - g - b_i - s)
               l_i = p (but for the last step) + d (but for the first)

The next keys and values travel behind the attention to those at hand, and so do the gradients of the step
before; all else is waited for. After the last step gradients have their way home. States of linear layers
are in states.py. These exchanges have lanes of their own: as in tensor parallelism, what gathers weights
hides behind the whole pass.
"""

from fractions import Fraction

from lowband.cost.collectives import Network
from lowband.cost.compute import Work
from lowband.cost.context import Part, counts_of_tokens, parts, passes, sent_along_context
from lowband.cost.context_load import attended
from lowband.cost.numbers import Num, join
from lowband.cost.states import sent_as_states
from lowband.predict.exposed import Waits
from lowband.predict.states import state_waits
from lowband.predict.workload import Workload
from lowband.spec.activations import (
    CONTEXT_GATHER,
    CONTEXT_GATHER_AGAIN,
    CONTEXT_HEADS,
    CONTEXT_HEADS_GRAD,
    CONTEXT_RING,
    CONTEXT_RING_AGAIN,
    CONTEXT_RING_GRAD,
    CONTEXT_SCATTER,
    CONTEXT_STATES,
    TOKENS_COUNT,
)
from lowband.spec.records import mean


def waits(job: Workload, network: Network, work: Work, overlap: float) -> Waits:
    """What a micro-batch waits for, a block in the mean over softmax and linear ones; once: the loss, for the
    count of tokens. The count's lane is that of a rank that has the loss.

    work: computation of a block; overlap: the share that can hide
    """
    if job.axes.context == 1:
        return Waits()
    layout, again = job.layout, job.recompute == "full"
    rows: dict[str, list[Part]] = {}
    for part in parts(job.model, job.axes.tensor, layout, job.compute_dtype):
        rows.setdefault(part.row.name, []).append(part)
    times = {name: each[0].times for name, each in rows.items()}
    row_s = {name: _row_s(job, network, each) for name, each in rows.items()}

    def step_s(name: str) -> Num:
        return row_s[name] / times[name] if times.get(name) else 0.0

    shares = attended(layout, job.stack.attention == "plain")
    whole = sum(shares)

    def ring_s(attention_s: Num, beside_s: Num, keys_s: Num, grads_s: Num = 0.0) -> Num:
        exposed: Num = 0.0
        for step, each in enumerate(shares):
            behind = float(each / whole) * attention_s + beside_s
            passed = (keys_s if step < len(shares) - 1 else 0.0) + (grads_s if step else 0.0)
            exposed = exposed + join(behind, passed, overlap) - behind
        return exposed + grads_s

    def fixed_s(*names: str) -> Num:
        return sum((row_s.get(name, 0.0) for name in names), start=0.0)

    gather, gather_again = step_s(CONTEXT_GATHER.name), step_s(CONTEXT_GATHER_AGAIN.name)
    forward = fixed_s(CONTEXT_HEADS.name, CONTEXT_GATHER.name) + ring_s(
        work.attention, gather, step_s(CONTEXT_RING.name)
    )
    waited = (CONTEXT_HEADS_GRAD, CONTEXT_GATHER_AGAIN, CONTEXT_SCATTER)
    backward = fixed_s(*(row.name for row in waited)) + ring_s(
        work.attention_backward,
        gather_again + step_s(CONTEXT_SCATTER.name),
        step_s(CONTEXT_RING_AGAIN.name),
        step_s(CONTEXT_RING_GRAD.name),
    )
    linear = job.model.linear_layers / job.model.layers  # shares of the blocks
    softmax, blocks = 1 - linear, job.model.layers // job.axes.pipeline
    lane = {name: softmax * blocks * passes(rows[name][0].row, again) * time for name, time in row_s.items()}
    count: Num = 0.0
    for hop, sent in counts_of_tokens(job.levels, job.scheme.level("replica")):
        count = count + network.hop_s(hop, float(sent))
    lane[TOKENS_COUNT.name] = count
    states = state_waits(job, network, work, overlap)
    if layout.travels is not None and linear:
        for row in CONTEXT_STATES[layout.travels]:
            lane[row.name] = linear * blocks * passes(row, again) * states.travel
    return Waits(
        softmax * forward + linear * states.forward,
        softmax * (backward + forward * again) + linear * states.backward,
        count,
        lane,
    )


def _row_s(job: Workload, network: Network, row: list[Part]) -> Num:
    """Seconds of a row in one pass of a block, in all its exchanges."""
    tokens, times = job.micro_batch * job.own_tokens, row[0].times
    if row[0].row.kind == "swap":
        sent = float(sum(part.bytes for part in row)) * tokens
        return times * network.pass_on_s([part.hop for part in row], sent / times) if times else 0.0
    total: Num = 0.0
    for part in row:
        total = total + network.hop_s(part.hop, float(part.bytes) * tokens, part.times)
    return total


def context_sent(job: Workload) -> dict[tuple[str, str, str], int | float]:
    """Bytes that a rank sends along context in a step, the mean over ranks: (level, row, wire) -> bytes.

    job: one point; {} on one rank
    """
    if job.axes.context == 1:
        return {}
    found = sent_along_context(
        job.model, job.layout, job.levels, job.axes.tensor, int(job.micro_batch * job.own_tokens),
        int(job.accumulation), job.recompute == "full", job.compute_dtype, job.scheme.level("replica"),
    )  # fmt: skip
    found |= sent_as_states(
        job.model, job.layout, job.axes.tensor, int(job.micro_batch), int(job.accumulation),
        job.recompute == "full",
    )  # fmt: skip
    stages = job.axes.pipeline  # each rank has its own layers, and one of them the loss
    shares = {key: Fraction(sent) / stages for key, sent in found.items()}
    return {key: mean(sent.numerator, sent.denominator) for key, sent in shares.items()}
