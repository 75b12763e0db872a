"""The network of a box as data: places, bridges, rates."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lowband.box.layout import Layout
from lowband.cost.tcp import FRAME_BYTES, PAYLOAD_BYTES
from lowband.errors import UserError
from lowband.spec.machine import Machine
from tests.checkout import CONFIG

BOX = CONFIG.machine("frontier-box")


def machine(sizes: list[int], rates: list[float], scale: float) -> Machine:
    levels = [
        {"name": f"l{i}", "size": size, "link": {"gigabytes_per_s": rate, "source": "test"}}
        for i, (size, rate) in enumerate(zip(sizes, rates[:-1], strict=True))
    ]
    world = {"name": "world", "link": {"gigabytes_per_s": rates[-1], "source": "test"}}
    box = {"scale": scale, "nodes": 9, "tflops": 1, "source": "test"}
    device = {"name": "test", "source": "test"}
    return Machine.parse(
        {"name": "test", "description": "test", "box": box, "device": device, "levels": [*levels, world]},
        "test",
    )


@given(
    factors=st.lists(st.integers(1, 4), min_size=2, max_size=4),
    nodes=st.integers(1, 4),
    scale=st.floats(1, 1e6),
)
def test_every_rank_reaches_the_core_over_the_links_of_its_groups(
    factors: list[int], nodes: int, scale: float
) -> None:
    sizes = [factors[0]]
    for factor in factors[1:]:
        sizes.append(sizes[-1] * factor)
    rates = [100.0 / (i + 1) for i in range(len(sizes) + 1)]
    layout = Layout.of(machine(sizes, rates, scale), sizes[-1] * nodes)
    up = {link.inner: link for link in layout.up_links()}
    core = layout.bridges()[-1]
    for rank in range(layout.levels.world):
        link, path = up[f"l0.{rank}"], []
        assert link.rank == rank
        path.append(link.level)
        while link.outer != core:
            link = up[link.outer]
            path.append(link.level)
        assert path == [*layout.levels.names[1:]]
    for index, name in enumerate(layout.levels.names[1:], start=1):
        size = layout.levels.sizes[index - 1]
        at_level = [link for link in up.values() if link.level == name]
        assert len(at_level) == layout.levels.world // size
        payload = size * rates[index - 1] * 1e9 / scale
        for link in at_level:
            assert link.bits_per_s == pytest.approx(payload * 8 * FRAME_BYTES / PAYLOAD_BYTES, abs=1)
    assert len({place.namespace for place in layout.places()}) == layout.levels.world
    assert len({place.address for place in layout.places()}) == layout.levels.world
    assert all(len(link.inner) + 1 <= 15 for link in up.values())  # interface names of the kernel


def test_frontier_box_is_frontier_divided_by_one_factor() -> None:
    frontier = CONFIG.machine("frontier")
    assert BOX.levels == frontier.levels
    assert BOX.device == frontier.device
    assert BOX.box is not None
    layout = Layout.of(BOX, 32)
    assert (layout.nodes, layout.node_size) == (4, 8)
    for index, level in enumerate(frontier.levels, start=1):
        assert level.link is not None
        assert layout.bytes_per_s(index) == level.link.gigabytes_per_s * 1e9 / BOX.box.scale


def test_outer_link_changes_only_the_outer_link() -> None:
    slow = BOX.with_outer_link(0.25)
    assert slow.levels[:-1] == BOX.levels[:-1]
    assert slow.levels[-1].link.gigabytes_per_s == BOX.levels[-1].link.gigabytes_per_s / 4
    with pytest.raises(UserError, match="has no link for level world"):
        CONFIG.machine("local").with_outer_link(2)


def test_a_box_without_links_is_refused() -> None:
    with pytest.raises(UserError, match="every level a link"):
        Machine.parse(
            CONFIG.machine("local").model_dump(exclude_none=True)
            | {"box": {"scale": 10, "nodes": 2, "tflops": 1, "source": "test"}},
            "test",
        )
