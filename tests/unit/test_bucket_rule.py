"""Which units' gradients are reduced together, by hand; buffers and sums of them."""

from math import prod
from unittest.mock import patch

import pytest
from texts import Text

from lowband.cost.memory import state_bytes
from lowband.spec import buckets as rule
from lowband.spec.buckets import buckets
from lowband.spec.mesh import SELF, WORLD, Levels
from lowband.spec.scheme import Scheme
from lowband.spec.sync import Sync
from tests.checkout import CONFIG

LEVELS = Levels.fit({"node": 4}, 8)
DDP = CONFIG.scheme("ddp")


def test_a_bucket_is_filled_until_the_next_unit_has_no_room() -> None:
    with patch.object(rule, "BUCKET_NUMEL", 10):
        assert buckets([4, 4, 3, 11, 7, 3, 1], DDP, LEVELS, "fp32") == [[0, 1], [2], [3], [4, 5], [6]]
    assert buckets([3 * 2**19] * 5, DDP, LEVELS, "fp32") == [[0, 1, 2, 3], [4]]  # 6 MiB each, in fp32
    assert buckets([], DDP, LEVELS, "fp32") == []


def test_a_model_in_one_bucket_takes_few_rounds_of_messages() -> None:
    levels = Levels.fit(CONFIG.machine("local").sizes, 8)
    units = [sum(map(prod, of_unit)) for of_unit in CONFIG.model("gpt-5m").unit_shapes()]
    hops = len(levels.hops(SELF, WORLD))
    assert len(buckets(units, DDP, levels, "fp32")) == 1
    Text("docs/benchmarks.md").says(
        f"{len(units)} units that went over {hops} levels, out and back, took {len(units) * 2 * hops} rounds "
        f"of messages per step; in one bucket they take {2 * hops}."
    )


@pytest.mark.parametrize("scheme", ["zero1", "zero3", "hier3"])
def test_what_ranks_hold_parts_of_stays_by_unit(scheme: str) -> None:
    assert buckets([1, 1], CONFIG.scheme(scheme), Levels.fit({"package": 2, "node": 4}, 8), "fp32") == [
        [0],
        [1],
    ]


def test_only_where_messages_go_and_values_travel_unchanged() -> None:
    alone = Levels.fit({"node": 1}, 1)
    assert buckets([1, 1], DDP, alone, "fp32") == [[0], [1]]
    for wire, dtype, found in (
        ("int8", "fp32", 2),
        ("bf16", "fp32", 2),
        ("bf16", "bf16", 1),
        ("fp32", "fp32", 1),
    ):
        scheme = DDP.model_copy(update={"replica_reduce": wire})
        assert len(buckets([1, 1], scheme, LEVELS, dtype)) == found


def test_replicas_that_meet_seldom_fill_buckets_of_their_own_reductions() -> None:
    def found(beyond: str) -> int:
        sync = Sync(beyond=beyond, every=4)
        scheme = Scheme(name="drawn", weights="self", grads="self", optim="self", sync=sync)
        return len(buckets([1, 1], scheme, LEVELS, "fp32"))

    assert found("node") == 1
    assert found("self") == 2  # no gradient moves


def test_bytes_of_buckets_by_hand() -> None:
    """Root 100, blocks 30, 40, 70 values: 70 + 40, then 30 + 100. On 2 ranks of gloo half comes back."""
    with patch.object(rule, "BUCKET_NUMEL", 130):
        held = state_bytes(
            [100, 30, 40, 70], DDP, Levels.fit({}, 2), "fp32", "fp32", 2, "gloo", order="breadth"
        )
    assert held["buffers"] == 4 * 130 * 3 // 2
    assert held["sums"] == 4 * (100 + 70)  # a unit's sum moves to its bucket when it is complete
