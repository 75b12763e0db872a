"""Named schedules: a row each, with the rule that writes every rank's list.

Fewer micro-batches than ranks are allowed everywhere: some ranks are then idle for longer.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from lowband.errors import UserError
from lowband.spec.schedule import Action, Kind, Lists

Name = Literal["depth", "gpipe", "1f1b", "interleaved", "breadth", "zb-h1", "zb-h2", "zb-v", "dualpipe-v"]


@dataclass(frozen=True)
class Schedule:
    """One row.

    of_rank:  (rank, ranks, micro-batches, chunks) -> the rank's list
    chunks:   the fewest and the most stages on a rank; None: any number
    in_a_vee: rank 0 has the first and the last stage, and so on inwards; otherwise the second chunk starts
              on rank 0 again
    splits:   whether some backwards come in two parts
    ranks:    the most; None: any number
    """

    of_rank: Callable[[int, int, int, int], list[Action]]
    chunks: tuple[int, int | None]
    in_a_vee: bool = False
    splits: bool = False
    ranks: int | None = None


def lists(name: Name, ranks: int, micro_batches: int, chunks: int) -> Lists:
    """The lists of a named schedule, by rank.

    chunks: stages on each rank, so that the pipeline has ranks x chunks of them
    Raises UserError for an unknown name, or for numbers that the schedule does not take.
    """
    check_numbers(name, ranks, micro_batches, chunks)
    return [SCHEDULES[name].of_rank(rank, ranks, micro_batches, chunks) for rank in range(ranks)]


def check_numbers(name: Name, ranks: int, micro_batches: int, chunks: int) -> None:
    """Raises UserError as `lists` does."""
    if name not in SCHEDULES:
        raise UserError(f"unknown schedule '{name}'", allowed=SCHEDULES)
    row = SCHEDULES[name]
    for what, given, (least, most) in (
        ("ranks", ranks, (1, row.ranks)),
        ("micro-batches", micro_batches, (1, None)),
        ("chunks", chunks, row.chunks),
    ):
        if given < least or (most is not None and given > most):
            allowed = (
                f"{least}" if least == most else f"{least} or more" if most is None else f"{least}-{most}"
            )
            raise UserError(f"schedule '{name}' with {given} {what}", allowed=f"{allowed} {what}")


def _one_each(forwards: Sequence[Action], backwards: Sequence[Action], ahead: int) -> list[Action]:
    """`ahead` forwards, then one of each in turn, then the backwards that are left."""
    found = [*forwards[:ahead]]
    for i, backward in enumerate(backwards):
        found += [*forwards[ahead + i : ahead + i + 1], backward]
    return found


def _of(kind: Kind, stage: int, micro_batches: Sequence[int]) -> list[Action]:
    return [Action(kind, stage, i) for i in micro_batches]


def _depth(rank: int, ranks: int, micro_batches: int, chunks: int) -> list[Action]:
    """Accumulation on one rank: a micro-batch goes through all stages and back before the next one starts."""
    found = []
    for i in range(micro_batches):
        found += [Action("forward", stage, i) for stage in range(chunks)]
        found += [Action("backward", stage, i) for stage in reversed(range(chunks))]
    return found


def _breadth(rank: int, ranks: int, micro_batches: int, chunks: int) -> list[Action]:
    """Each stage computes all micro-batches in turn (Lamy-Poirier, arXiv 2211.05953).

    With one chunk: GPipe (Huang et al., arXiv 1811.06965). On one rank: accumulation unit by unit.
    """
    stages, all_of_them = range(rank, ranks * chunks, ranks), range(micro_batches)
    forwards = [action for stage in stages for action in _of("forward", stage, all_of_them)]
    backwards = [action for stage in reversed(stages) for action in _of("backward", stage, all_of_them)]
    return forwards + backwards


def _one_f_one_b(rank: int, ranks: int, micro_batches: int, chunks: int) -> list[Action]:
    """As many forwards ahead as ranks are behind (Narayanan et al., arXiv 2104.04473, section 2.2.1)."""
    all_of_them = range(micro_batches)
    return _one_each(
        _of("forward", rank, all_of_them), _of("backward", rank, all_of_them), ahead=ranks - 1 - rank
    )


def _interleaved(rank: int, ranks: int, micro_batches: int, chunks: int) -> list[Action]:
    """1F1B, where a round of micro-batches goes through one chunk after the other (section 2.2.2).

    A round is one micro-batch per rank. Where they do not divide, there are as many rounds as full ones, of
    more micro-batches each, the first rounds of one more than the last.
    """
    rounds = max(1, micro_batches // ranks)
    size, larger = divmod(micro_batches, rounds)
    bounds = [i * size + min(i, larger) for i in range(rounds + 1)]
    turns = [range(*bounds[i : i + 2]) for i in range(rounds)]
    stages = range(rank, ranks * chunks, ranks)
    return _one_each(
        [action for turn in turns for stage in stages for action in _of("forward", stage, turn)],
        [action for turn in turns for stage in reversed(stages) for action in _of("backward", stage, turn)],
        ahead=(chunks - 1) * len(turns[0]) + 2 * (ranks - 1 - rank),
    )


def _zb_h(times: int, rank: int, ranks: int, micro_batches: int) -> list[Action]:
    """1F1B with split backwards, whose weight parts wait (Qi et al., arXiv 2401.10241, section 2).

    times: as many forwards ahead as 1F1B's. Rank r puts off the weight parts of this many times r
           micro-batches: they fill its wait at the end, and it holds no more than rank 0.
    """
    all_of_them, late, found = range(micro_batches), times * rank, list[Action]()
    for action in _one_each(
        _of("forward", rank, all_of_them), _of("input", rank, all_of_them), times * (ranks - 1 - rank)
    ):
        found.append(action)
        if action.kind == "input":
            found += [Action("weight", rank, i) for i in [action.micro_batch - late] if i >= 0]
    return found + _of("weight", rank, all_of_them[-late:] if late else [])


def _zb_h1(rank: int, ranks: int, micro_batches: int, chunks: int) -> list[Action]:
    """In the memory of 1F1B."""
    return _zb_h(1, rank, ranks, micro_batches)


def _zb_h2(rank: int, ranks: int, micro_batches: int, chunks: int) -> list[Action]:
    """In twice that memory: no bubble where forward, input and weight take equally long."""
    return _zb_h(2, rank, ranks, micro_batches)


class _Vee:
    """The list of a rank with two stages in a V, in the making.

    Counts micro-batches by kind and chunk: callers say what comes next, not for which micro-batch. What
    would exceed the number of micro-batches is left out.
    """

    def __init__(self, rank: int, ranks: int, micro_batches: int) -> None:
        self.found: list[Action] = []
        self._stages, self._micro_batches = (rank, 2 * ranks - 1 - rank), micro_batches
        self._next = {"forward": [0, 0], "backward": [0, 0]}  # by chunk
        self._owed: deque[Action] = deque()  # weight parts, in the order of their input parts

    def left(self, chunk: int) -> int:
        """Forwards of a chunk that are still to come."""
        return self._micro_batches - self._next["forward"][chunk]

    def add(self, kind: Kind, chunk: int) -> None:
        following = self._next["forward" if kind == "forward" else "backward"]
        if (at := following[chunk]) < self._micro_batches:
            following[chunk] += 1
            self.found.append(Action(kind, self._stages[chunk], at))
            if kind == "input":
                self._owed.append(Action("weight", self._stages[chunk], at))

    def pay(self, chunk: int | None = None) -> None:
        """Add the oldest weight part that is owed, or the oldest of a chunk, if there is one."""
        mine = (action for action in self._owed if chunk is None or action.stage == self._stages[chunk])
        if (oldest := next(mine, None)) is not None:
            self._owed.remove(oldest)
            self.found.append(oldest)

    def both(self, chunk: int) -> None:
        """A backward in two parts, one right after the other."""
        self.add("input", chunk)
        self.pay(chunk)


def _whole(micro_batches: int, least: int, write: Callable[[int], _Vee]) -> list[Action]:
    """A list for fewer micro-batches than fill the pipeline: one that fills it, without those beyond."""
    found = write(max(micro_batches, least)).found
    return [action for action in found if action.micro_batch < micro_batches]


def _zb_v(rank: int, ranks: int, micro_batches: int, chunks: int) -> list[Action]:
    """Zero bubble where forward, input and weight take equally long, in the memory of 1F1B (section 6)."""

    def write(filling: int) -> _Vee:
        row = _Vee(rank, ranks, filling)
        for _ in range(2 * (ranks - rank) - 1):  # down to the V's tip and back, for the first micro-batch
            row.add("forward", 0)
        for _ in range(rank):
            row.add("forward", 1)
            row.add("forward", 0)
        for _ in range(ranks - rank):
            row.add("forward", 1)
            row.both(1)
        while row.left(1):
            row.add("forward", 0)
            row.both(0)
            row.add("forward", 1)
            row.both(1)
        for _ in range(rank):  # weight parts wait and fill the end
            row.add("input", 0)
            row.add("input", 1)
        for _ in range(ranks - rank):
            row.add("input", 0)
            row.pay(0)
        for chunk in (1, 0):
            for _ in range(rank):
                row.pay(chunk)
        return row

    return _whole(micro_batches, 2 * ranks - 1, write)


def _dualpipe_v(rank: int, ranks: int, micro_batches: int, chunks: int) -> list[Action]:
    """DualPipe (DeepSeek-AI, arXiv 2412.19437, section 3.2.1) cut in half, on half of the ranks.

    Its forwards run beside the backward that follows each of them, where a machine can do so.
    """

    def write(filling: int) -> _Vee:
        row = _Vee(rank, ranks, filling)
        behind = ranks - 1 - rank
        for _ in range(2 * behind):
            row.add("forward", 0)
        for _ in range(rank + 1):
            row.add("forward", 0)
            row.add("forward", 1)
        for _ in range(behind):
            row.both(1)
            row.add("forward", 1)
        for _ in range(filling - 2 * ranks + rank + 1):  # in the middle, whole backwards
            for chunk in (0, 1):
                row.add("forward", chunk)
                row.add("backward", 1 - chunk)
        for _ in range(behind):
            row.add("backward", 1)
            row.add("forward", 1)
            row.add("backward", 0)
        for i in range(2 * (rank + 1)):  # the second half of these are split
            row.add("input" if i > rank else "backward", 1 - i % 2)
        for _ in range(behind):
            row.pay()
            row.add("input", 0)
        for _ in range(rank + 1):
            row.pay()
        return row

    return _whole(micro_batches, 2 * ranks, write)


SCHEDULES: dict[Name, Schedule] = {
    "depth": Schedule(_depth, chunks=(1, None), ranks=1),
    "gpipe": Schedule(_breadth, chunks=(1, 1)),
    "1f1b": Schedule(_one_f_one_b, chunks=(1, 1)),
    "interleaved": Schedule(_interleaved, chunks=(2, None)),
    "breadth": Schedule(_breadth, chunks=(1, None)),
    "zb-h1": Schedule(_zb_h1, chunks=(1, 1), splits=True),
    "zb-h2": Schedule(_zb_h2, chunks=(1, 1), splits=True),
    "zb-v": Schedule(_zb_v, chunks=(2, 2), in_a_vee=True, splits=True),
    "dualpipe-v": Schedule(_dualpipe_v, chunks=(2, 2), in_a_vee=True, splits=True),
}
