"""What a block's passes wait for tokens on their way to experts of other ranks and back.

Exchanges follow one another, and nothing is computed meanwhile: a row's seconds are, with crossings c of the
way (cost/experts.py) over levels of a rate and a latency,

    flat           base + sum over c of (messages(c) latency(c) + bytes(c) / rate(c))
    hops, merged   sum over c of (base + messages(c) latency(c) + bytes(c) / rate(c))

With parts (Axes.route_parts) each row has so many times the messages, and a part is computed while others are
on their way: what is left of the wait is cost.experts.in_turns_s, as if one link carried all rows.

Of an uneven load the fullest rank decides, which receives rows, and sends them back: `Workload.load` times
the mean. Over hops that is an upper bound, as of a group's ranks not every one need be as full. Copies of the
most loaded experts are sent beside; for that fewer tokens leave their group of the outermost level, and the
fullest rank has less (cost/popular.py). The loads that balance experts are summed once a step.
"""

from fractions import Fraction

from lowband.cost.collectives import Network
from lowband.cost.context import passes
from lowband.cost.experts import AHEAD, Part, in_turns_s, load_by_hop, parts, sent_to_experts
from lowband.cost.numbers import Num
from lowband.predict.exposed import Waits
from lowband.predict.place import Place, places
from lowband.predict.workload import Workload
from lowband.spec.activations import EXPERTS_LOAD, ROUTE_BACK, ROUTE_OUT_GRAD, ROUTE_WEIGHTS_GRAD
from lowband.spec.mesh import Levels
from lowband.spec.records import mean


def route_waits(job: Workload, place: Place, network: Network, products_s: Num) -> Waits:
    """What blocks wait for; once: the loads that balance experts. The lane is that of a step.

    network: of exchanges other than those of sharding; products_s: of a block's experts, forward
    """
    if job.model.experts is None:
        return Waits()
    rows: dict[str, list[Part]] = {}
    of_way = job.model, job.levels_of_experts, job.axes.route, job.compute_dtype, job.axes.copies
    for part in parts(*of_way, job.crossing, job.axes.route_parts):
        rows.setdefault(part.row.name, []).append(part)
    again, lane, routed = job.recompute == "full", dict[str, Num](), 1 - job.model.dense_share
    there: dict[str | None, Num] = {"forward": 0.0, "backward": 0.0}  # before the experts compute
    back: dict[str | None, Num] = {"forward": 0.0, "backward": 0.0}
    for name, each in rows.items():
        row, time = each[0].row, routed * _row_s(job, network, each)
        side = back if row in (ROUTE_BACK, ROUTE_OUT_GRAD, ROUTE_WEIGHTS_GRAD) else there
        side[row.during] = side[row.during] + time
        lane[name] = job.accumulation * place.blocks * passes(row, again) * time
    balance: Num = 0.0
    for levels in _token_axes(job):
        for hop, sent in load_by_hop(job.model, place.blocks, levels):
            balance = balance + network.hop_s(hop, float(sent))
    lane[EXPERTS_LOAD.name] = balance
    forward, backward = (
        _left(job.axes.route_parts, there[each], back[each], products * products_s, ahead)
        for each, products, ahead in (("forward", 1, AHEAD), ("backward", 2, job.axes.route_parts))
    )
    return Waits(forward, backward + again * forward, balance, lane)


def _left(turns: int, there_s: Num, back_s: Num, products_s: Num, ahead: int) -> Num:
    """What of the exchanges no products hide. ahead: see cost.experts.in_turns_s"""
    if turns == 1:
        return there_s + back_s
    return in_turns_s(turns, there_s, products_s, back_s, ahead) - products_s


def _row_s(job: Workload, network: Network, row: list[Part]) -> Num:
    """Seconds of a row in one pass of a block."""
    total: Num = network.base_s * job.axes.route_parts * (1 if job.axes.route == "flat" else len(row))
    for part in row:
        sent = float(part.of_token) * job.load * _tokens(job) + float(part.fixed)
        total = total + float(part.messages) * network.latency_s(part.level) + sent / network.rate(part.level)
    return total


def _tokens(job: Workload) -> Num:
    """Of a rank and micro-batch."""
    return job.micro_batch * job.own_tokens / job.axes.outside


def _token_axes(job: Workload) -> list[Levels]:
    """Levels of the axes whose ranks have different tokens."""
    cut = job.axes.tensor > 1 and job.axes.sequence_parallel
    return [job.levels, *([job.mesh.levels("tensor")] if cut else [])]


def experts_sent(job: Workload) -> dict[tuple[str, str, str], int | float]:
    """Bytes that a rank sends to and from experts in a step, in the mean: (level, row, wire) -> bytes.

    job: one point
    """
    axes = job.axes
    routed, ranks = job.model.layers - job.model.dense_layers, axes.pipeline
    blocks = [routed * (place + 1) // ranks - routed * place // ranks for place in range(ranks)]
    found = sent_to_experts(
        job.model, job.levels_of_experts, axes.route, _token_axes(job),
        [place.blocks for place in places(job)] if axes.is_uneven else blocks,
        Fraction(int(job.micro_batch * job.own_tokens), axes.outside), int(job.accumulation),
        job.recompute == "full", job.compute_dtype, axes.copies, job.crossing, axes.route_parts,
    )  # fmt: skip
    return {key: mean(sent.numerator, sent.denominator) for key, sent in found.items()}
