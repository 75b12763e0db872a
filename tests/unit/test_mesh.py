"""A mesh against ranks written out and sorted into groups by hand."""

from collections import Counter
from fractions import Fraction
from math import prod

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from lowband.errors import UserError
from lowband.spec.axes import Axes, Ways
from lowband.spec.mesh import SELF, WORLD, Digit, Levels, Mesh
from lowband.spec.partition import shard_range
from lowband.spec.scheme import Scheme
from tests.refused import refusal


def test_the_example() -> None:
    mesh = Mesh.fit({"node": 8}, {"tensor": 2, "data": 4, "pipeline": 2})
    assert mesh.digits == (
        Digit("tensor", "node", 2, 1),
        Digit("data", "node", 4, 2),
        Digit("pipeline", WORLD, 2, 8),
    )
    assert mesh.group("data", 3) == [1, 3, 5, 7]
    assert mesh.group("pipeline", 3) == [3, 11]


@st.composite
def layouts(draw) -> tuple[dict[str, int], dict[str, int]]:
    """Level sizes and degrees of up to three axes, powers of two; the outermost perhaps times three."""
    inner, size = {}, 1
    for i in range(draw(st.integers(0, 3))):
        size *= 2 ** draw(st.integers(0, 2))
        inner[f"level{i}"] = size
    degrees = {axis: 2 ** draw(st.integers(0, 2)) for axis in ("a", "b")}
    return inner, {**degrees, "c": draw(st.sampled_from([1, 2, 4, 3 * size]))}


def coordinates(rank: int, degrees: dict[str, int]) -> dict[str, int]:
    found = {}
    for axis, degree in degrees.items():
        found[axis], rank = rank % degree, rank // degree
    return found


@settings(max_examples=150, deadline=None)
@given(layouts())
def test_groups_levels_and_hops(layout: tuple[dict[str, int], dict[str, int]]) -> None:
    inner, degrees = layout
    try:
        mesh = Mesh.fit(inner, degrees)
    except UserError:
        assume(False)  # an axis that ends inside a group
    ranks = prod(degrees.values())
    places = [coordinates(rank, degrees) for rank in range(ranks)]
    for axis, degree in degrees.items():
        others = [name for name in degrees if name != axis]
        levels = mesh.levels(axis)
        assert levels.world == degree
        for rank in range(ranks):
            alike = [r for r in range(ranks) if all(places[r][o] == places[rank][o] for o in others)]
            assert mesh.group(axis, rank) == alike
            for name, size in inner.items():  # as many of them share the rank's group of a level
                shared = [r for r in alike if r // size == rank // size]
                assert levels.size(name) == len(shared), (axis, name)
            chained = [rank]
            for hop in levels.hops(SELF, WORLD):  # hop by hop the whole group
                chained = [partner for r in chained for partner in hop.partners(r)]
            assert sorted(chained) == alike


def test_one_axis_is_the_levels_of_all_ranks() -> None:
    for ranks in (1, 2, 4, 8, 24):
        inner = {"package": 2, "node": 8}
        assert Mesh.fit(inner, {"data": ranks}).levels("data") == Levels.fit(inner, ranks)


@pytest.mark.parametrize(
    ("inner", "degrees"),
    [({"node": 8}, {"tensor": 3}), ({"node": 8}, {"data": 12}), ({"node": 6}, {"tensor": 4, "data": 3})],
)
def test_an_axis_that_ends_inside_a_group_is_refused(inner: dict[str, int], degrees: dict[str, int]) -> None:
    with pytest.raises(UserError, match="level 'node' of"):
        Mesh.fit(inner, {**degrees, "pipeline": 2})


def test_what_is_stored_of_axes_has_no_axis_of_one_rank() -> None:
    assert Axes().model_dump() == {}
    assert Axes(tensor=2).model_dump() == {"tensor": 2}
    assert Axes.parse(Axes(tensor=2).model_dump(mode="json"), "stored") == Axes(tensor=2)


def test_options_have_sequence_parallelism_wherever_there_is_a_tensor_axis() -> None:
    assert [Ways.of_options(tp).sequence_parallel for tp in (1, 2, 3, 8)] == [False, True, True, True]


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        ({"tensor": 0}, "Axes: tensor: Input should be greater than 0, not 0"),
        ({"pipeline": "x"}, "Axes: pipeline: Input should be a valid integer, unable to parse"),
        ({"tensors": 2}, "Axes: unknown key 'tensors' (allowed: context, context_attention, context_states,"),
    ],
)
def test_wrong_axes_are_refused_in_one_line(wrong: dict[str, object], text: str) -> None:
    assert refusal(Axes, **wrong).startswith(text)
    with pytest.raises(UserError, match=r"^Scheme: key 'grads' is missing$"):
        Scheme(name="mine", weights="self", optim="world")


@settings(max_examples=150, deadline=None)
@given(layouts(), st.data())
def test_the_level_between_two_ranks(
    layout: tuple[dict[str, int], dict[str, int]], data: st.DataObject
) -> None:
    """Along each axis: of the levels whose groups hold both, the innermost."""
    inner, degrees = layout
    try:
        mesh = Mesh.fit(inner, degrees)
    except UserError:
        assume(False)  # an axis that ends inside a group
    sizes = {SELF: 1, **inner, WORLD: prod(degrees.values())}
    rank = data.draw(st.integers(0, prod(degrees.values()) - 1))
    for axis in degrees:
        for other in mesh.group(axis, rank):
            holding = [name for name, size in sizes.items() if rank // size == other // size]
            assert mesh.levels(axis).common(rank, other) == holding[0]


@settings(max_examples=150, deadline=None)
@given(st.lists(st.integers(1, 4), min_size=1, max_size=4), st.data())
def test_a_ring_by_its_ranks(counts: list[int], data: st.DataObject) -> None:
    """Links and places of a ring against ranks written out: who is next, and which level holds both."""
    sizes = {f"level{i}": prod(counts[: i + 1]) for i in range(len(counts) - 1)}
    levels = Levels.fit(sizes, prod(counts))
    first, last = sorted(data.draw(st.integers(0, len(counts))) for _ in range(2))
    inner, outer = levels.names[first], levels.names[last]
    ring, across = levels.ring(inner, outer), levels.size(outer) // levels.size(inner)
    assert (ring is None) == (across == 1)
    if ring is None:
        return
    rank = data.draw(st.integers(0, levels.world - 1))
    stride, size = levels.size(inner), levels.size(outer)
    ranks = [r for r in range(levels.world) if r // size == rank // size and r % stride == rank % stride]
    assert ring.hop.partners(rank) == ranks
    assert ring.hop.count == across
    links = []
    for at, one in enumerate(ranks):
        following = ranks[(at + 1) % across]
        holding = [
            name for name in levels.names if one // levels.size(name) == following // levels.size(name)
        ]
        links.append(holding[0])
        assert ring.level(one) == links[at]
        start, _ = shard_range(levels.world, levels, outer, one)
        start_of_whole, _ = shard_range(levels.world, levels, inner, one)
        assert (start - start_of_whole) * size == ring.places[at] * levels.world
    assert ring.senders == {hop.level: links.count(hop.level) for hop in ring.hops}
    others = Counter(
        next(name for name in levels.names if one // levels.size(name) == rank // levels.size(name))
        for one in ranks
        if one != rank
    )
    joined = levels.joined(inner, outer)
    assert joined.shares(rank) == {level: Fraction(count, across - 1) for level, count in others.items()}
    assert (joined.hop, joined.places) == (ring.hop, ring.places)
