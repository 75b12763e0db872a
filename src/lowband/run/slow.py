"""Which rank computes, or which link sends, more slowly than its likes. Pure arithmetic.

In a step all ranks wait for the slowest, so all take equally long. What differs is what is left of a step
without the waits for collectives: a rank that computes slowly has the most of it. And of a message between
two ranks the end that came later sees how long it took (engine.transport.gloo, [Note: how long a message
took]): the shorter of both ends' times, pair by pair, is longest where a link is slow.

[Note: chance] On a busy machine some rank is the slowest in every step. If that is chance, it is another one
each time: of n, one is the slowest in k or more of m steps with a probability of at most n P(X >= k), X
binomial (m, 1 / n). One is named only if that is below CHANCE, counting only the steps in which it took
SLOWER times the median.

[Note: late] Who waited for a slow pair comes late to the next messages, all at once, while those that came
early shared their ports with fewer: its messages take longer than the median, up to as many times as there
are partners. But less than those of the pair, if that is slow enough. A rank whose own link is slow is one of
the slowest pair, whose messages that link slows as much as its others, to within NEAR. So who comes late may
still be named beside a path that is less than NEAR times slower; and of a slow link and a slower path
elsewhere the path alone.
"""

from collections.abc import Mapping, Sequence
from itertools import combinations
from math import comb
from statistics import median, median_low

from lowband.spec.mesh import SELF, Levels
from lowband.spec.records import Slow, Slowest, StepRecord

SLOWER = {"rank": 1.1, "link": 1.5}  # times the median; less is not worth a line
NEAR = 1.5
CHANCE = 1e-3
WINDOW = 50  # last steps

Pair = tuple[int, int]


def slowest(
    levels: Levels, computing_s: Sequence[float], message_s: Sequence[Mapping[int, float]]
) -> tuple[Slowest, ...]:
    """Of one step: the slowest rank in computing, and of each level the slowest rank and pair in messages.

    computing_s: by rank, seconds without waits for collectives
    message_s:   by rank, the seconds of its largest message with each partner; none without messages
    What has nothing to be compared with is left out; a rank with one partner of a level is a pair.
    """
    found = _first(SELF, {(rank,): seconds for rank, seconds in enumerate(computing_s)})
    both: dict[str, dict[Pair, float]] = {}
    for a, b in combinations(range(levels.world), 2):
        if b in message_s[a] and a in message_s[b]:
            both.setdefault(levels.common(a, b), {})[a, b] = min(message_s[a][b], message_s[b][a])
    for level, pairs in both.items():
        of_rank = {
            (rank,): [seconds for pair, seconds in pairs.items() if rank in pair]
            for rank in range(levels.world)
        }
        if all(len(mine) != 1 for mine in of_rank.values()):
            found += _first(level, {rank: min(mine) for rank, mine in of_rank.items() if mine})
        found += _first(level, pairs)
    return tuple(found)


def _first(level: str, seconds: Mapping[tuple[int, ...], float]) -> list[Slowest]:
    if len(seconds) < 2:
        return []
    ranks = max(seconds, key=lambda ranks: seconds[ranks])
    middle = median_low(seconds.values())
    return [Slowest(level=level, ranks=ranks, seconds=seconds[ranks], median_s=middle, compared=len(seconds))]


def named(steps: Sequence[StepRecord]) -> tuple[Slow, ...]:
    """The slow rank and the slow link of these steps: none, one, or one of each.

    steps: without warm-up; only the last WINDOW count
    Of messages, a rank with all its messages of a level explains more than a pair; the rank that pairs of
    several levels share explains them all; of other pairs the slowest is named. See [Note: late].
    """
    recent = steps[-WINDOW:]
    found = [*_often(recent, SELF, 1)]
    inner_first = list(dict.fromkeys(one.level for step in recent for one in step.slowest))
    ranks = [slow for level in inner_first if level != SELF for slow in _often(recent, level, 1)]
    pairs = [slow for level in inner_first for slow in _often(recent, level, 2)]
    if links := _explained(ranks, pairs):
        shared = set.intersection(*(set(slow.ranks) for slow in links))
        worst = max(links, key=lambda slow: slow.times)
        if len(links) > 1 and len(shared) == 1:
            level = " and ".join(slow.level for slow in links)
            worst = worst.model_copy(update={"ranks": tuple(shared), "level": level})
        found.append(worst)
    return tuple(found)


def _explained(ranks: Sequence[Slow], pairs: Sequence[Slow]) -> Sequence[Slow]:
    """Of slow ranks and pairs, those that do not just come late. See [Note: late]."""
    if not pairs:
        return ranks
    worst = max(pairs, key=lambda slow: slow.times)
    itself = [
        slow for slow in ranks
        if slow.ranks[0] in worst.ranks and slow.times * NEAR > worst.times
    ]  # fmt: skip
    return itself or [slow for slow in pairs if slow.times * NEAR > worst.times]


def _often(steps: Sequence[StepRecord], level: str, ranks: int) -> list[Slow]:
    """The rank (ranks: 1) or pair (2) of a level that was slow in more steps than by chance, if any."""
    seen = [one for step in steps for one in step.slowest if one.level == level and len(one.ranks) == ranks]
    limit = SLOWER["rank" if level == SELF else "link"]
    times: dict[tuple[int, ...], list[float]] = {}
    for one in seen:
        if one.times >= limit:
            times.setdefault(one.ranks, []).append(one.times)
    return [
        Slow(
            level=level, ranks=which, times=median(mine), compared=seen[-1].compared,
            steps=len(mine), of_steps=len(seen),
        )
        for which, mine in times.items()
        if chance(len(mine), len(seen), seen[-1].compared) < CHANCE
    ]  # fmt: skip


def chance(k: int, m: int, n: int) -> float:
    """At least the probability that one of n is the slowest in k or more of m steps if each is equally
    likely. See [Note: chance].
    """
    tail = sum(comb(m, i) * (n - 1) ** (m - i) for i in range(k, m + 1))
    return min(1.0, n * tail / n**m)
