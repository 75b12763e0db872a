"""Lists for slow sends: published schedules assume that a result is where it is needed at once.

A list scheduler (cost/player.py) plays the step, its ranks guided by a *wanted time* of each action: those of
a published list (on its timeline, with sends or without), or of a step on as many devices as there are
actions. Each is played with a few habits: whether to wait for an action that is wanted earlier and on its
way, when a weight part, which nobody waits for, may fill a gap or go first, and whether stages share their
rank's memory freely. The shortest of all these steps is the answer, the published lists themselves among
them; nothing is random.
"""

from collections.abc import Iterator
from itertools import product
from math import isfinite

from lowband.cost.player import Found, Habits, Player, Seconds
from lowband.cost.timeline import timeline
from lowband.errors import UserError
from lowband.spec.schedule import Action, Lists, peak
from lowband.spec.schedules import SCHEDULES, Name, lists

FILLS = (0.0, 1.0)  # a weight part fills a gap that is at most this share of it too short
WAITS = (0.0, 1.0, 2.0)  # wait for what is wanted earlier, at most this many forwards
PAYS = (False, True)  # whether weight parts go first when they are wanted first
SHARES = (False, True)  # whether each stage has its own share of the memory, by how long it holds activations

MOST_ACTIONS = 20_000  # of a step
COMPARED: tuple[Name, ...] = ("1f1b", "zb-h1", "zb-v")


def lists_for_sends(
    ranks: int,
    micro_batches: int,
    forward_s: float,
    input_s: float,
    weight_s: float,
    send_s: float,
    memory: float | None = None,
) -> Lists:
    """Lists of a step for slow sends, for `lowband.Pipeline(schedule=...)`: one stage on each rank, or two in
    a V.

    forward_s, input_s, weight_s: seconds of one micro-batch in all of a rank's stages, which are alike; a
                                  backward is its input and weight parts
    send_s:                       until a result is on the next rank
    memory:                       the most micro-batches whose activations a rank holds; default: as many as
                                  ranks, as 1F1B and zb-v do

    Never longer, by the timeline, than the best published schedule that fits the memory.
    Raises UserError for numbers that are no step.
    """
    return search(ranks, micro_batches, Seconds(forward_s, input_s, weight_s, send_s), memory).lists


def search(ranks: int, micro_batches: int, seconds: Seconds, memory: float | None = None) -> Found:
    """As `lists_for_sends`, with what it found beside the lists."""
    best = best_published(ranks, micro_batches, seconds, memory)
    limit = float(ranks if memory is None else memory)
    shapes: tuple[tuple[int, Name], ...] = ((1, "zb-h1"), (2, "zb-v"))
    for chunks, name in shapes if ranks > 1 else ():
        part, most = seconds.of_a_stage(chunks), int(limit * chunks + 1e-9)
        player = Player(lists(name, ranks, micro_batches, chunks), micro_batches, part, most)
        habits = [Habits(*each) for each in product(FILLS, WAITS, PAYS, SHARES)]
        for wanted, habit in product(player.sources(), habits):
            if shorter := player.play(wanted, habit, best.step_s * (1 - 1e-9)):
                # Played with waits on purpose; the lists alone may end sooner.
                best = Found(shorter.lists, shorter.name, float(timeline(shorter.lists, *part).step_s))
    return best


def best_published(ranks: int, micro_batches: int, seconds: Seconds, memory: float | None = None) -> Found:
    """The shortest step of the named schedules that fit the memory, with one or two stages on a rank."""
    limit = float(ranks if memory is None else memory)
    _check_numbers(ranks, micro_batches, seconds, limit)
    return min(_published(ranks, micro_batches, seconds, limit), key=lambda found: found.step_s)


def compared(
    ranks: int, micro_batches: int, seconds: Seconds, memory: float | None = None
) -> dict[str, object]:
    """One row: bubbles of 1F1B, ZB-H1 and ZB-V (None where they exceed the memory), of the best published
    schedule, and of the search; `found`: the name of what it returns, "searched" if it is none."""
    limit = float(ranks if memory is None else memory)
    best, found = (of(ranks, micro_batches, seconds, limit) for of in (best_published, search))
    by_name = {each.name: each for each in _published(ranks, micro_batches, seconds, limit)}
    bubbles = {
        f"bubble_{name.replace('-', '_')}": each and each.bubble(seconds, micro_batches)
        for name in COMPARED
        for each in [by_name.get(name)]
    }
    return {
        "ranks": ranks,
        "micro_batches": micro_batches,
        "send_over_forward": seconds.send / seconds.forward,
        "weight_over_forward": seconds.weight / seconds.forward,
        "memory": limit,
        **bubbles,
        "published": best.name or "one by one",
        "bubble_published": best.bubble(seconds, micro_batches),
        "found": found.name or ("searched" if found.step_s < best.step_s else "one by one"),
        "bubble_found": found.bubble(seconds, micro_batches),
    }


def _check_numbers(ranks: int, micro_batches: int, seconds: Seconds, limit: float) -> None:
    for what, given in (("ranks", ranks), ("micro-batches", micro_batches)):
        if given < 1:
            raise UserError(f"a schedule for {given} {what}", allowed="1 or more")
    if 2 * 3 * ranks * micro_batches > MOST_ACTIONS:
        raise UserError(
            f"a search over {ranks} ranks and {micro_batches} micro-batches",
            allowed=f"ranks x micro-batches of at most {MOST_ACTIONS // 6:,}",
        )
    for name, given in seconds._asdict().items():
        if not isfinite(given) or given < 0 or (given == 0 and name != "send"):
            raise UserError(f"a schedule with {name} {given} s", allowed="more than 0; of a send, 0 or more")
    if not limit >= 1:
        raise UserError(f"a schedule in the memory of {limit:g} micro-batches", allowed="1 or more")


def _published(ranks: int, micro_batches: int, seconds: Seconds, limit: float) -> Iterator[Found]:
    """Named schedules that fit the memory; if none does, one micro-batch after the other."""
    if ranks > 1:
        one_by_one = [
            [Action(kind, rank, i) for i in range(micro_batches) for kind in ("forward", "backward")]
            for rank in range(ranks)
        ]
        yield Found(one_by_one, None, float(timeline(one_by_one, *seconds).step_s))
    for (name, row), chunks in product(SCHEDULES.items(), (1, 2)):
        least, most = row.chunks
        if chunks < least or chunks > (most or chunks) or ranks > (row.ranks or ranks):
            continue
        of_it = lists(name, ranks, micro_batches, chunks)
        if max(peak(of_it)) <= limit * chunks + 1e-9:
            yield Found(of_it, name, float(timeline(of_it, *seconds.of_a_stage(chunks)).step_s))
