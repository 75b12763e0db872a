"""Tokens of a sequence over the ranks along context: which are whose, and how ranks attend, level by level.

    heads    an all-to-all: a rank gets all tokens of some heads                  inside
    gather   keys and values of all ranks are gathered on each
    ring     keys and values travel from rank to rank, one block at a time        outside
    state    of linear layers: the sum of what came before, as large for any      on all levels
             number of tokens: passed on, gathered, or scanned level by level

Ranks that differ on levels of `heads` alone share one part of the sequence; there are as many parts as ranks
on the other levels. With zigzag part i of n is the pieces i and 2 n - 1 - i of 2 n, so that under a causal
mask all parts have equally many pairs of a query and a key; without it the last has 2 n - 1 times as many as
the first.

Source: DeepSpeed Ulysses (arXiv 2309.14509), Llama 3 (arXiv 2407.21783, section 3.3.2), ring attention
(arXiv 2310.01889), USP (arXiv 2405.07719), LASP (arXiv 2404.02882), LASP-2 (arXiv 2502.07563).
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations_with_replacement, pairwise
from math import lcm, prod
from typing import Final, Literal, get_args

from lowband.errors import UserError
from lowband.spec.axes import Axes
from lowband.spec.mesh import SELF, WORLD, Levels, Mesh
from lowband.spec.model import ModelSpec
from lowband.spec.scheme import Scheme
from lowband.spec.step import States, StatesOption

Way = Literal["heads", "gather", "ring", "state"]
WAYS: Final[tuple[Way, ...]] = get_args(Way)  # in the order in which they may lie, inner to outer

WHERE: Final = "context_attention"


class WrongLayers(UserError):
    """A layer of softmax or a linear one, which cannot attend as the ranks do."""


Run = tuple[int, int]  # positions of neighbouring tokens: first and last-plus-one


def ways_of(attention: str | Mapping[str, str], levels: Levels) -> dict[str, Way]:
    """By level that context ranks cross, inner to outer, how they attend.

    attention: a way for all levels; or by level, as a mapping or as text, `package=heads,world=ring`
    levels:    as the ranks along context see them
    Raises UserError for an unknown way or level, for a level without one, and for another order than heads
    inside, then gather, then ring, and for state beside another way.
    """
    crossed = [hop.level for hop in levels.hops(SELF, WORLD)]
    if isinstance(attention, str) and "=" not in attention:
        given: Mapping[str, str] = dict.fromkeys(crossed or [WORLD], attention)
    else:
        given = _by_level(attention) if isinstance(attention, str) else attention
    _check_names(given, levels.names)
    if "state" in given.values() and {*given.values()} != {"state"}:
        others = sorted({*given.values()} - {"state"})
        what = f"state on one level and {others[0]} on another: layers are linear or they are not"
        raise UserError(what, where=WHERE, allowed="state on all levels, or on none")
    if missing := [level for level in crossed if level not in given]:
        what = f"no way for level '{missing[0]}', which context ranks cross"
        raise UserError(what, where=WHERE, allowed=WAYS)
    found: dict[str, Way] = {level: given[level] for level in crossed}  # type: ignore[misc]
    for (inner, a), (outer, b) in pairwise(found.items()):
        if WAYS.index(a) > WAYS.index(b):
            what = f"{a} on '{inner}' lies inside of {b} on '{outer}'"
            raise UserError(what, where=WHERE, allowed="from the inside: heads, gather, ring")
    return found


def _by_level(attention: str) -> dict[str, str]:
    pairs = [part.strip().partition("=") for part in attention.split(",")]
    return {level: way for level, _, way in pairs}


def _check_names(given: Mapping[str, str], levels: Sequence[str]) -> None:
    for level, way in given.items():
        if level not in levels:
            raise UserError(f"no level '{level}'", where=WHERE, allowed=levels)
        if way not in WAYS:
            raise UserError(f"unknown way '{way}'", where=WHERE, allowed=WAYS)


def check_names(ways: Iterable[str], levels: Sequence[str]) -> None:
    """Raises UserError for a way, as text, that no ranks could attend in. levels: the machine's"""
    for way in ways:
        _check_names(_by_level(way) if "=" in way else {WORLD: way}, (SELF, *levels))


def every_way(levels: Levels) -> list[str]:
    """Each way of softmax for all levels that context ranks cross, and each mix of them that their order
    allows, as `ways_of` reads them."""
    crossed, ways = [hop.level for hop in levels.hops(SELF, WORLD)], [way for way in WAYS if way != "state"]
    mixes = [mix for mix in combinations_with_replacement(ways, len(crossed)) if len(set(mix)) > 1]
    by_level = [",".join(f"{a}={b}" for a, b in zip(crossed, mix, strict=True)) for mix in mixes]
    return [*ways, *by_level]


def check_context(axes: Axes, scheme: Scheme, levels: Levels) -> None:
    """Raises UserError if ranks along context would be of different replicas, whose weights differ.

    levels: as the ranks along data see them
    """
    if axes.context > 1 and scheme.sync is not None and levels.size(scheme.sync.beyond) % axes.context:
        raise UserError(
            f"context {axes.context} crosses replicas, the groups of level '{scheme.sync.beyond}'",
            where=f"scheme '{scheme.name}'",
            allowed=f"what divides {levels.size(scheme.sync.beyond)}, the ranks of a replica",
        )


@dataclass(frozen=True)
class Layout:
    """Which tokens are whose, and how ranks attend.

    levels: as ranks along context see them; ways: by level that they cross; states: of linear layers, which
            may lie between layers that attend by these ways; auto: those of the way `state` alone, by scan
    """

    levels: Levels
    ways: Mapping[str, Way]
    zigzag: bool
    states: StatesOption = "auto"

    def __post_init__(self) -> None:
        """Raises UserError for zigzag beside states, which walk tokens in order."""
        if self.zigzag and self.travels is not None:
            what = "zigzag gives a rank tokens of both ends of a sequence, and states walk them in order"
            raise UserError(what, where="context_states", allowed="zigzag false")

    @property
    def travels(self) -> States | None:
        """How states of linear layers travel; None if they do not."""
        if self.levels.world == 1:
            return None
        if self.states != "auto":
            return self.states
        return "scan" if "state" in self.ways.values() else None

    def check_layers(self, softmax: bool, linear: bool) -> None:
        """Raises WrongLayers if layers of these kinds cannot attend so."""
        if self.levels.world == 1:
            return
        ways = ", ".join(dict.fromkeys(self.ways.values()))
        if softmax and "state" in self.ways.values():
            what = "softmax has no state: it needs every key"
            raise WrongLayers(what, where="context_attention state", allowed="heads, gather, ring")
        if linear and self.travels is None:
            what = "is for keys and values, and linear layers exchange states"
            allowed = "state; beside softmax layers context_states pass, gather, scan"
            raise WrongLayers(what, where=f"context_attention {ways}", allowed=allowed)

    def ranks(self, way: Way) -> int:
        """Ranks in a group of those that attend so."""
        return self._ranks[way]

    @cached_property
    def _ranks(self) -> dict[Way, int]:
        """Every layer of every pass asks for these."""
        hops = self.levels.hops(SELF, WORLD)
        return {way: prod(hop.count for hop in hops if self.ways[hop.level] == way) for way in WAYS}

    def span(self, way: Way) -> tuple[str, str]:
        """The levels between which ranks attend so, inner and outer."""
        ends, at = {}, SELF
        for each in WAYS:
            start, at = at, [at, *(level for level, found in self.ways.items() if found == each)][-1]
            ends[each] = start, at
        return ends[way]

    @cached_property
    def parts(self) -> int:
        """Of the sequence."""
        return self.ranks("gather") * self.ranks("ring") * self.ranks("state")

    @cached_property
    def multiple(self) -> int:
        """Tokens of a sequence are padded to a multiple of this."""
        return self.parts * lcm(2 if self.zigzag and self.parts > 1 else 1, self.ranks("heads"))

    def padded(self, length: int) -> int:
        return -(-length // self.multiple) * self.multiple

    def runs(self, part: int, length: int) -> list[Run]:
        """The tokens of a part, in its order. length: of the sequence, a multiple of `multiple`"""
        n = self.parts
        if n == 1 or not self.zigzag:
            piece = length // n
            return [(part * piece, (part + 1) * piece)]
        piece = length // (2 * n)
        return [(i * piece, (i + 1) * piece) for i in (part, 2 * n - 1 - part)]

    def positions(self, place: int, length: int) -> Sequence[int]:
        """The tokens of the rank of that number along context, in its order."""
        part, of_heads = divmod(place, self.ranks("heads"))
        tokens = [position for run in self.runs(part, length) for position in range(*run)]
        mine = len(tokens) // self.ranks("heads")
        return tokens[of_heads * mine : (of_heads + 1) * mine]


def layout_of(sizes: Mapping[str, int], axes: Axes, ranks: int) -> Layout:
    """Which tokens of a sequence are whose, on a machine whose levels have these sizes.

    Raises UserError for ways that do not fit the levels.
    """
    levels = Mesh.fit(sizes, axes.with_context(ranks)).levels("context")
    ways = ways_of(axes.context_attention, levels)
    return Layout(levels, ways, axes.zigzag, axes.context_states)


def check_layout(layout: Layout, axes: Axes, model: ModelSpec, seq_len: int) -> None:
    """Raises UserError for lengths and heads that ranks along context cannot divide, and for layers that do
    not attend so."""
    where, linear = f"context {axes.context}", model.linear_layers
    layout.check_layers(softmax=linear < model.layers, linear=linear > 0)
    if layout.travels is not None and not linear:
        what = f"model '{model.name}' has no linear layers, whose states would travel"
        raise UserError(what, where=f"context_states {axes.context_states}", allowed="auto")
    if seq_len % layout.multiple:
        allowed = f"multiples of {layout.multiple}"
        raise UserError(f"{seq_len} tokens cannot be divided", where=where, allowed=allowed)
    heads, ranks = model.heads // axes.tensor, layout.ranks("heads")
    groups = max((model.kv_heads or model.heads) // axes.tensor, 1)
    if heads % ranks or (groups % ranks and ranks % groups):
        of_keys = "" if groups == heads else f" with {groups} of keys"
        raise UserError(f"{heads} heads{of_keys} cannot be divided over {ranks} ranks of heads", where=where)
