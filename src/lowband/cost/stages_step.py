"""How long a named schedule's step takes where its stages, or the links between them, differ.

Messages between stages either are part of what a stage takes, or travel beside the computation: one leaves
when its stage has been computed and the rank's messages before it have left, and what needs it waits until it
has arrived (engine/parallel/mail.py). What hides it is what the receiver's list has to compute meanwhile:
nothing as a pipeline fills and drains, and little in 1F1B, where p ranks have p micro-batches under way, so
that each trip of p of them through all ranks and back waits for 2 (p - 1) messages.
"""

from array import array
from collections.abc import Mapping
from functools import lru_cache
from itertools import islice

from lowband.spec.schedule import Kind
from lowband.spec.schedules import SCHEDULES, Name, lists

# Micro-batches per rank beyond which a pipeline is in its steady state: if ranks divide them, and if not; and
# how many more with messages beside the computation.
FILLED, FILLED_UNEVENLY, FILLED_LATER = 4, 6, 2

OfStage = tuple[float, float, float]  # seconds of a forward, and of a backward's input and weight part
KINDS: tuple[Kind, ...] = ("forward", "input", "weight", "backward")


@lru_cache(maxsize=2**14)  # a search asks for the same ones under every placement
def step_s(
    name: Name,
    ranks: int,
    micro_batches: int,
    of_stage: tuple[OfStage, ...],
    send_s: tuple[float, ...] = (),
) -> float:
    """Seconds of a named schedule's step where stages differ.

    of_stage: of each stage
    send_s:   of a message beside the computation, behind each stage but the last; none: part of `of_stage`

    Simulated for at most 4 micro-batches per rank, or 6 where ranks do not divide them, and 2 more with
    messages beside the computation: from there on each round of them, one per rank, adds as much as the last
    two in the mean, because the slowest rank is never idle, or waits as long in each of them, and as much as
    this rank computes at least (to 1 % in 99 of 100 drawn pipelines).
    """
    filled = FILLED_UNEVENLY if micro_batches % ranks else FILLED
    rounds = 2 if any(send_s) else 1
    filled += FILLED_LATER if rounds > 1 else 0
    if micro_batches > filled * ranks:
        at = (filled - 1) * ranks + 1 + (micro_batches - 1) % ranks
        here, before = (step_s(name, ranks, each, of_stage, send_s) for each in (at, at - rounds * ranks))
        busy = [0.0] * ranks
        for stage, seconds in enumerate(of_stage):
            busy[place_of(name, stage, ranks)] += sum(seconds)
        return here + (micro_batches - at) // ranks * max((here - before) / rounds, ranks * max(busy))
    return simulated_s(name, ranks, micro_batches, of_stage, send_s or (0.0,) * (len(of_stage) - 1))


def place_of(name: Name, stage: int, ranks: int) -> int:
    """Which rank along pipeline has a stage."""
    turn, at = divmod(stage, ranks)
    return ranks - 1 - at if SCHEDULES[name].in_a_vee and turn else at


def simulated_s(
    name: Name, ranks: int, micro_batches: int, of_stage: tuple[OfStage, ...], send_s: tuple[float, ...]
) -> float:
    """The same of every action, as `cost.timeline.timeline` has it where messages take no time."""
    seconds = [s for f, i, w in of_stage for s in (f, i, w, i + w)]  # by KINDS
    ends, left = [0.0] * ranks, [0.0] * ranks  # of ranks' last actions, and of their last messages
    arrivals = list[float]()
    of_ranks, whiches, needs, behinds = _order(name, ranks, micro_batches, len(of_stage))
    if not any(send_s):  # none is behind another
        behinds = array("i", [-1]) * len(of_ranks)
    for rank, which, need, behind in zip(of_ranks, whiches, needs, behinds, strict=True):
        end = ends[rank]
        if need >= 0 and arrivals[need] > end:
            end = arrivals[need]
        ends[rank] = end = end + seconds[which]
        if behind >= 0:
            end = max(end, left[rank])
            left[rank] = end = end + send_s[behind]
        arrivals.append(end)
    return max(ends)


listed = lru_cache(maxsize=16)(lists)  # a job's peak and its time are of the same lists


@lru_cache(maxsize=256)
def _order(name: Name, ranks: int, micro_batches: int, stages: int) -> "tuple[array[int], ...]":
    """A schedule's actions, each after what it needs: its rank; its place among the stages' seconds; the
    action on another rank whose result it takes; and behind which stage its own leaves for another rank. -1:
    none. What the rank itself computes is there in time, as its list is in order.

    `spec.schedule.walk` finds the same order; a search over thousands of pipelines needs it in a fraction of
    that time.
    """
    schedule = listed(name, ranks, micro_batches, stages // ranks)
    rank_of = {action.stage: rank for rank, of_rank in enumerate(schedule) for action in of_rank}
    taken = {
        (kind, stage): _taken(kind, stage, rank_of, micro_batches) for kind in KINDS for stage in rank_of
    }
    found = of_ranks, whiches, needs, behinds = array("i"), array("i"), array("i"), array("i")
    actions, at = sum(map(len, schedule)), [0] * ranks
    done = [-1] * (2 * stages * micro_batches)
    while len(of_ranks) < actions:
        for rank, of_rank in enumerate(schedule):
            for kind, stage, i in islice(of_rank, at[rank], None):
                which, source, own, behind = taken[kind, stage]
                need = -1
                if source >= 0:
                    need = done[source + i]
                    if need < 0:
                        break
                if own >= 0:
                    done[own + i] = len(of_ranks)
                of_ranks.append(rank)
                whiches.append(which)
                needs.append(need)
                behinds.append(behind)
                at[rank] += 1
    return found


def _taken(
    kind: Kind, stage: int, rank_of: Mapping[int, int], micro_batches: int
) -> tuple[int, int, int, int]:
    """Of a kind of action of a stage, of every micro-batch: its place among the stages' seconds; where among
    the results, which lie by direction, stage and micro-batch, those that it takes from another rank begin,
    and where its own; and behind which stage these leave for another rank. -1: none."""
    which = 4 * stage + KINDS.index(kind)
    if kind == "weight":
        return which, -1, -1, -1
    here, step = rank_of[stage], 1 if kind == "forward" else -1
    before, after = stage - step, stage + step
    first = 0 if kind == "forward" else len(rank_of)
    source = (first + before) * micro_batches if rank_of.get(before, here) != here else -1
    behind = min(stage, after) if rank_of.get(after, here) != here else -1
    return which, source, (first + stage) * micro_batches, behind
