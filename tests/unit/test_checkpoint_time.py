"""A checkpoint's time in closed form, by hand: 20B on 384 GCDs of Frontier."""

import pytest

from lowband.cost.checkpoint import all_bytes, checkpoint_time, rank_bytes, writers
from lowband.spec.machine import Storage
from lowband.spec.mesh import Levels
from lowband.spec.sourced import Fact
from tests.checkout import CONFIG


def storage(**changes: float) -> Storage:
    rates = {
        "write_gigabytes_per_s": 100.0, "read_gigabytes_per_s": 200.0, "node_gigabytes_per_s": 10.0,
        "sha256_gigabytes_per_s": 2.0, "copy_gigabytes_per_s": 20.0, **changes,
    }  # fmt: skip
    return Storage(**{name: Fact(value=rate, source="test") for name, rate in rates.items()})


def test_by_hand() -> None:
    """16 ranks on 2 nodes hold 1 GB each: 16 GB, of which a node writes 8 at 10 GB/s."""
    found = checkpoint_time(storage(), 10**9, 16, 16, 8)
    assert found == pytest.approx((0.05, 0.5 + 0.8, 0.5 + 0.8 + 0.8 + 0.05))
    # The whole file system is the bottleneck: 16 GB at 4 GB/s.
    assert checkpoint_time(storage(write_gigabytes_per_s=4), 10**9, 16, 16, 8).write_s == pytest.approx(4.5)
    # Replicas: the 4 ranks of one group write, all 16 read.
    few = checkpoint_time(storage(), 4 * 10**9, 4, 16, 8)
    assert few.write_s == pytest.approx(2 + 1.6)
    assert few.read_s == pytest.approx(0.5 + 0.8 + 3.2 + 0.2)


def test_frontier_at_384_ranks() -> None:
    """20.6B parameters: 12 bytes each, 643 MB a rank; less than a minute at the slowest rates."""
    rates = CONFIG.machine("frontier").storage
    assert rates is not None
    mine = rank_bytes(20_600_000_000, CONFIG.scheme("zero3"), Levels.fit({"node": 8}, 384))
    slow, value, fast = (
        checkpoint_time(rates, mine, 384, 384, 8, case) for case in ("slow", "value", "fast")
    )
    assert fast.write_s < value.write_s < slow.write_s < 60
    assert value.write_s == pytest.approx(12 * 20.6 / 384 / 1.5 + 12 * 20.6 / 48 / 10, rel=1e-6)


def test_replicas_each_have_their_states() -> None:
    """DiLoCo on 2 nodes of 8: twice 12 bytes, the anchor and the momentum once."""
    levels, diloco = Levels.fit({"node": 8}, 16), CONFIG.scheme("diloco")
    assert all_bytes(16, diloco, levels) == (2 * 12 + 4 + 4) * 16
    assert rank_bytes(16, diloco, levels) == 12 * 2 + 4 * 2 + 4
    assert writers(diloco, levels) == 16
    hsdp = CONFIG.scheme("hsdp")
    assert all_bytes(16, hsdp, levels) == 12 * 16
    assert (rank_bytes(16, hsdp, levels), writers(hsdp, levels)) == (12 * 2, 8)
