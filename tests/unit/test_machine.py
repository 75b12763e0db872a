"""Levels, hops and who owns which slice."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lowband.errors import UserError
from lowband.spec.config import Config
from lowband.spec.machine import Machine, Power
from lowband.spec.mesh import SELF, WORLD, Levels
from lowband.spec.partition import ALIGN, UnitLayout, intersect, shard_range
from lowband.spec.sourced import Fact

ROOT = Path(__file__).parents[2]

# Sizes of 1 to 4 levels of any ratios.
ratios = st.lists(st.integers(1, 5), min_size=1, max_size=4)


def levels_of(steps: list[int]) -> Levels:
    sizes, size = {}, 1
    for i, step in enumerate(steps[:-1]):
        size *= step
        sizes[f"level{i}"] = size
    return Levels.fit(sizes, size * steps[-1])


@given(ratios, st.data())
def test_hops_partition_the_ranks(steps: list[int], data: st.DataObject) -> None:
    levels = levels_of(steps)
    rank = data.draw(st.integers(0, levels.world - 1))
    for hop in levels.hops(SELF, WORLD):
        partners = hop.partners(rank)
        assert len(partners) == hop.count
        assert partners[hop.coordinate(rank)] == rank
        assert all(hop.partners(other) == partners for other in partners)
    reach = 1
    for hop in levels.hops(SELF, WORLD):
        assert hop.stride == reach
        reach *= hop.count
    assert reach == levels.world


@given(ratios, st.lists(st.lists(st.integers(1, 40), max_size=3), min_size=1, max_size=6))
def test_shards_tile_and_nest(steps: list[int], shapes: list[list[int]]) -> None:
    levels = levels_of(steps)
    layout = UnitLayout.of([tuple(shape) for shape in shapes], levels.world)
    assert layout.numel % (ALIGN * levels.world) == 0
    for level, size in zip(levels.names, levels.sizes, strict=True):
        ranges = [shard_range(layout.numel, levels, level, rank) for rank in range(levels.world)]
        # Every element has world / size owners, one in each group of the level.
        assert sum(stop - start for start, stop in ranges) == layout.numel * levels.world // size
        for first in range(0, levels.world, size):
            group = sorted(ranges[first : first + size])
            assert [start for start, _ in group] == [i * layout.numel // size for i in range(size)]
    for rank in range(levels.world):
        inner = (0, layout.numel)
        for level in levels.names:
            shard = shard_range(layout.numel, levels, level, rank)
            assert intersect(shard, inner) == shard
            inner = shard


@given(ratios, st.lists(st.lists(st.integers(0, 40), max_size=3), min_size=1, max_size=6))
def test_parameters_do_not_overlap(steps: list[int], shapes: list[list[int]]) -> None:
    layout = UnitLayout.of([tuple(shape) for shape in shapes], levels_of(steps).world)
    end = 0
    for start, stop in layout.ranges():
        assert start >= end
        assert start % ALIGN == 0
        end = stop
    assert end <= layout.numel


def test_larger_levels_are_cut_to_the_world() -> None:
    levels = Levels.fit({"package": 2, "node": 8}, 4)
    assert levels.sizes == (1, 2, 4, 4)
    assert [hop.level for hop in levels.hops(SELF, WORLD)] == ["package", "node"]


@pytest.mark.parametrize(("inner", "world"), [({"package": 2}, 3), ({"package": 2, "node": 8}, 12), ({}, 0)])
def test_ranks_that_do_not_fill_groups_are_refused(inner: dict[str, int], world: int) -> None:
    with pytest.raises(UserError, match=str(world)):
        Levels.fit(inner, world)


@pytest.mark.parametrize("inner", [{"node": 0}, {"world": 4}, {"self": 1}, {"host": 4}, {"disk": 4}])
def test_levels_that_nobody_can_tell_apart_are_refused(inner: dict[str, int]) -> None:
    with pytest.raises(UserError, match=f"inner levels {inner}"):
        Levels.fit(inner, 8)


def test_unknown_level_names_the_known_ones() -> None:
    with pytest.raises(UserError, match="rack") as error:
        Levels.fit({"node": 2}, 4).size("rack")
    assert "self, node, world" in str(error.value)


def test_the_attained_box_has_the_rates_that_frontiers_facts_give() -> None:
    """Links: nominal rate x efficiency x the stack's share of it; computation: peak x efficiency.

    To a fifth: the box's runs were made with an earlier fit of the shares.
    """
    config = Config(Path(__file__).parents[2])
    frontier, box = (config.machine(name) for name in ("frontier", "attained-box"))
    stack = config.given_stack(None, frontier)
    assert box.box is not None
    for level, scaled in zip(frontier.levels, box.levels, strict=True):
        assert level.link is not None and level.link.efficiency is not None and scaled.link is not None
        share = stack.efficiency.get(level.name)
        rate = level.link.gigabytes_per_s * level.link.efficiency.value * (share.value if share else 1)
        assert scaled.link.gigabytes_per_s == pytest.approx(rate, rel=0.201), level.name
    device = frontier.device
    assert device.matmul_efficiency is not None
    reached = device.peak_tflops["bf16"] * device.matmul_efficiency.value
    assert box.box.tflops == pytest.approx(reached, rel=0.01)


@pytest.mark.parametrize(
    ("value", "place"),
    [(1.9, "outside"), (2, "on a bound"), (2.02, "on a bound"), (2.03, "inside"), (3.97, "inside"),
     (3.98, "on a bound"), (4, "on a bound"), (4.1, "outside")],
)  # fmt: skip
def test_a_fitted_constant_lies_in_its_bounds(value: float, place: str) -> None:
    """Within a hundredth of the range, 0.02, it lies on a bound; of what was not fitted nothing is said."""
    bounds = {"low": 2, "high": 4, "source": "made up"}
    fitted = Fact(value=value, source="made up", calibrated_on=("row",), bounds=bounds)
    assert fitted.place == place
    assert Fact(value=value, source="made up").place is None


ZERO = {"value": 0, "source": "made up"}
NO_LOW = {"value": 0.5, "low": 0, "source": "made up"}


@pytest.mark.parametrize(
    ("place", "value", "says"),
    [
        (("device", "matmul_efficiency"), ZERO, "nothing could be divided by it"),
        (("device", "memory_efficiency"), NO_LOW, "nothing could be divided by it"),
        (("storage", "write_gigabytes_per_s"), ZERO, "nothing could be divided by it"),
        (("levels", 1, "link", "efficiency"), NO_LOW, "nothing could be divided by it"),
        (("levels", 1, "link", "gigabytes_per_s"), 5e-324, "greater than or equal to 0"),
        (("device", "memory_gib"), 1e300, "less than or equal to 1"),
        (("device", "peak_tflops", "bf16"), float("inf"), "finite"),
        (("device", "peak_tflops", "bf16"), 3e8, "less than or equal to 1000000"),
        (("levels", 0, "size"), 10**8, "less than or equal to 1048576"),
        (("device", "kernel_us"), {"value": 1e300, "source": "made up"}, "less than or equal to 1"),
    ],
)
def test_a_number_that_no_machine_has_is_refused(place: tuple, value: object, says: str) -> None:
    """A prediction would divide by zero, or be infinite."""
    sound = Config(ROOT).machine("frontier").model_dump(exclude_none=True)
    *path, last = place
    part = sound
    for key in path:
        part = part[key]
    part[last] = value
    with pytest.raises(UserError, match=f"^file: {place[0]}.*{says}"):
        Machine.parse(sound, "file")


@pytest.mark.parametrize("name", ["package", "self", "host", "disk"])
def test_levels_have_names_of_their_own(name: str) -> None:
    values = Config(ROOT).machine("frontier").model_dump(exclude_none=True)
    assert values["levels"][0]["name"] == "package"
    values["levels"][1]["name"] = name
    with pytest.raises(UserError, match="level names are unique and none is self or "):
        Machine.parse(values, "machine.yaml")


def test_a_box_needs_a_link_at_every_level() -> None:
    box = Config(ROOT).machine("frontier-box").model_dump(exclude_none=True)
    Machine.parse(box, "file")
    del box["levels"][1]["link"]
    with pytest.raises(UserError, match="a box has a level inside world, and every level a link"):
        Machine.parse(box, "file")


def test_the_hardware_names_every_level_and_its_link() -> None:
    machine = Config(ROOT).machine("frontier-box")
    levels = machine.hardware["levels"]
    assert [level["name"] for level in levels] == [level.name for level in machine.levels]
    assert all(level["link"]["gigabytes_per_s"] > 0 for level in levels)


def test_powers_source_is_that_of_both() -> None:
    peak, idle = {"value": 400, "source": "x"}, {"value": 60, "source": "y"}
    assert Power.parse({"peak_watts": peak}, "a file").source == "x"
    assert Power.parse({"peak_watts": peak, "idle_watts": idle}, "a file").source == "x; idle: y"
