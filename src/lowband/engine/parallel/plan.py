"""What a pipeline's schedule means for one of its ranks: its actions, and what it sends and awaits.

All of it follows from the lists, on every rank alike, before anything is computed.
"""

from collections.abc import Mapping, Sequence
from numbers import Integral
from typing import NamedTuple

from lowband.errors import UserError
from lowband.spec.schedule import Action, Done, Lists, check, needs, stages
from lowband.spec.schedules import SCHEDULES, Name, lists


class Plan:
    """One rank's part of a schedule.

    actions:  what it computes, in order
    last:     the pipeline's last stage
    stages:   those of this rank, in order
    split:    (stage, micro-batch) whose backwards come in two parts
    ends:     places in the list at which the gradients of a stage's weights are complete
    incoming: by rank, the results that it sends to this one, in the order in which it computes them
    """

    def __init__(self, lists: Lists, place: int) -> None:
        """lists: as `spec.schedule.check` accepts them; place: of this rank along the axis"""
        self.actions, self.last, self._place = list(lists[place]), stages(lists) - 1, place
        self.rank_of = {action.stage: rank for rank, of_rank in enumerate(lists) for action in of_rank}
        self.stages = sorted(stage for stage, rank in self.rank_of.items() if rank == place)
        self.split = {(each.stage, each.micro_batch) for each in self.actions if each.kind == "input"}
        self.ends = set({a.stage: k for k, a in enumerate(self.actions) if "weight" in a.parts}.values())
        self._made: dict[Done, int] = {}  # at which place in the list of the rank that computes it
        self._used: dict[Done, int] = {}  # and of the one that it is sent to
        for of_rank in lists:
            for k, action in enumerate(of_rank):
                self._made.update(((part, action.stage, action.micro_batch), k) for part in action.parts)
        for rank, of_rank in enumerate(lists):
            for k, action in enumerate(of_rank):
                sent = (need for need in needs(action, self.last) if self.rank_of[need[1]] != rank)
                self._used.update((need, k) for need in sent)
        others = set(range(len(lists))) - {place}
        self.incoming = {rank: [d for d in self._made if self._goes(d, rank, place)] for rank in others}
        for of_it in self.incoming.values():
            of_it.sort(key=self._made.__getitem__)

    def _goes(self, done: Done, source: int, to: int) -> bool:
        return done in self._used and self.rank_of[done[1]] == source and self.receiver(done) == to

    def receiver(self, done: Done) -> int | None:
        """The place of the rank that takes a result; None if it stays on its rank, or nobody takes it."""
        part, stage, _ = done
        taker = self.rank_of.get(stage + 1 if part == "forward" else stage - 1)
        return taker if done in self._used else None

    def awaited(self, action: Action) -> list[Done]:
        """The results of other ranks that an action takes."""
        return [need for need in needs(action, self.last) if self.rank_of[need[1]] != self._place]

    def is_taken(self, sent: Done, received: Done) -> bool:
        """Whether the rank that computed a result has before taken one that this rank has sent to it."""
        return self._used[sent] <= self._made[received]


class Cut(NamedTuple):
    """The modules of one stage: places in the chain from start to stop."""

    start: int
    stop: int


def cut(modules: int, count: int, layers: Sequence[int] | None) -> list[Cut]:
    """A chain of modules, cut into stages.

    layers: modules of each stage, in order; default: as evenly as possible, the first stages one more
    Raises UserError for a stage without modules, or modules without a stage.
    """
    if layers is None:
        if modules < count:
            what = f"{modules} modules cannot be cut into {count} stages"
            raise UserError(what, where="a pipeline", allowed="a module or more for each stage")
        size, more = divmod(modules, count)
        layers = [size + (stage < more) for stage in range(count)]
    are_numbers = all(isinstance(number, Integral) for number in layers)
    if not are_numbers or len(layers) != count or min(layers) < 1 or sum(layers) != modules:
        raise UserError(
            f"layers {list(layers)} for {count} stages of {modules} modules",
            where="a pipeline",
            allowed=f"{count} numbers of 1 or more whose sum is {modules}",
        )
    starts = [sum(layers[:stage]) for stage in range(count)]
    return [Cut(start, start + size) for start, size in zip(starts, layers, strict=True)]


def ends(named: Mapping[str, object]) -> set[str]:
    """Of a chain's first and last module the names of those that are of another class than their neighbour,
    as an embedding and a head are."""
    names, kinds = list(named), [type(module) for module in named.values()]
    if len(names) < 3:
        return set()
    return {names[end] for end, beside in ((0, 1), (-1, -2)) if kinds[end] is not kinds[beside]}


def check_apart(names: Sequence[str], modules: Sequence[object], cuts: Sequence[Cut], plan: Plan) -> None:
    """Raises UserError for a module of the chain in two stages of one rank, whose weights it has once.

    names, modules: of the chain, in order; cuts: of each stage
    """
    stage_of: dict[tuple[int, int], int] = {}  # by rank and module
    for stage, (start, stop) in enumerate(cuts):
        for name, module in zip(names[start:stop], modules[start:stop], strict=True):
            before = stage_of.setdefault((plan.rank_of[stage], id(module)), stage)
            if before != stage:
                raise UserError(
                    f"module '{name}' is in stages {before} and {stage}, which are of one rank",
                    where="a pipeline",
                    allowed="a module of its own in each stage; they may share parameters",
                )


def lists_of(schedule: Name | Lists, ranks: int, micro_batches: int, chunks: int | None) -> Lists:
    """The checked lists of a pipeline: of a schedule by name, or one's own."""
    if isinstance(schedule, str):
        fewest = SCHEDULES[schedule].chunks[0] if schedule in SCHEDULES else 1
        found = lists(schedule, ranks, micro_batches, fewest if chunks is None else chunks)
    else:
        found = schedule
        if chunks is not None:
            raise UserError("chunks beside lists of actions", where="a pipeline", allowed="one of both")
        are_lists = all(isinstance(each, list | tuple) and not isinstance(each, Action) for each in found)
        if not are_lists or not all(isinstance(action, Action) for each in found for action in each):
            raise UserError(
                "a schedule has what is no action", where="a pipeline",
                allowed="lists of lowband.spec.schedule.Action, by rank",
            )  # fmt: skip
    _check_lists(found, ranks, micro_batches)
    return found


def _check_lists(of_ranks: Lists, ranks: int, micro_batches: int) -> None:
    """Raises UserError for lists that are no step of that many ranks and micro-batches."""
    check(of_ranks)
    found = 1 + max(action.micro_batch for of_rank in of_ranks for action in of_rank)
    for what, given, expected in (("ranks", len(of_ranks), ranks), ("micro-batches", found, micro_batches)):
        if given != expected:
            raise UserError(f"a schedule for {given} {what}, of {expected}", where="a pipeline")
    if idle := [rank for rank, of_rank in enumerate(of_ranks) if not of_rank]:
        raise UserError(f"ranks {idle} of a schedule have no stage", allowed="a stage or more on each rank")
