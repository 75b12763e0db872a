"""How long a named schedule's step takes where its stages, or the links between them, differ.

Messages between stages either are part of what a stage takes, or travel beside the computation: one leaves
when its stage has been computed and the rank's messages before it have left, and what needs it waits until it
has arrived (engine/parallel/mail.py). What hides it is what the receiver's list has to compute meanwhile:
nothing as a pipeline fills and drains, and little in 1F1B, where p ranks have p micro-batches under way, so
that each trip of p of them through all ranks and back waits for 2 (p - 1) messages.
"""

from functools import lru_cache

from lowband.spec.schedule import Done, walk
from lowband.spec.schedules import Name, lists

FILLED = 6  # micro-batches per rank: beyond them a pipeline is in its steady state

OfStage = tuple[float, float, float]  # seconds of a forward, and of a backward's input and weight part
KINDS = ("forward", "input", "weight", "backward")


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

    Simulated for at most 6 micro-batches per rank: from there on each round of them, one per rank, adds as
    much as the last one, because the slowest rank is never idle, or waits as long in each round (to 2 %).
    """
    if micro_batches > FILLED * ranks:
        at = (FILLED - 1) * ranks + 1 + (micro_batches - 1) % ranks
        here, before = (step_s(name, ranks, each, of_stage, send_s) for each in (at, at - ranks))
        return here + (micro_batches - at) // ranks * (here - before)
    return _simulated(name, ranks, micro_batches, of_stage, send_s or (0.0,) * (len(of_stage) - 1))


def _simulated(
    name: Name, ranks: int, micro_batches: int, of_stage: tuple[OfStage, ...], send_s: tuple[float, ...]
) -> float:
    seconds = [s for f, i, w in of_stage for s in (f, i, w, i + w)]  # by KINDS
    ends, left = [0.0] * ranks, [0.0] * ranks  # of ranks' last actions, and of their last messages
    arrivals = list[float]()
    for rank, which, need, behind in _order(name, ranks, micro_batches, len(of_stage)):
        end = ends[rank]
        if need >= 0 and arrivals[need] > end:
            end = arrivals[need]
        ends[rank] = end = end + seconds[which]
        if behind >= 0:
            left[rank] = end = max(end, left[rank]) + send_s[behind]
        arrivals.append(end)
    return max(ends)


@lru_cache(maxsize=32)
def _order(name: Name, ranks: int, micro_batches: int, stages: int) -> list[tuple[int, int, int, int]]:
    """A schedule's actions, each after what it needs: its rank; its place among the stages' seconds; the
    action on another rank whose result it takes; and behind which stage its own leaves for another rank. -1:
    none. What the rank itself computes is there in time, as its list is in order."""
    schedule = lists(name, ranks, micro_batches, stages // ranks)
    rank_of = {action.stage: rank for rank, of_rank in enumerate(schedule) for action in of_rank}
    found, done = list[tuple[int, int, int, int]](), dict[Done, int]()
    for rank, action, needed in walk(schedule):
        kind, stage, i = action
        need = next((done[each] for each in needed if rank_of[each[1]] != rank), -1)
        to = stage + {"forward": 1, "weight": 0}.get(kind, -1)
        leaves = rank_of.get(to, rank) != rank
        found.append((rank, 4 * stage + KINDS.index(kind), need, min(stage, to) if leaves else -1))
        done.update(((part, stage, i), len(found) - 1) for part in action.parts)
    return found
