"""A step waits for the slowest device: the arithmetic against integrals, and where a prediction shows it."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.integrate import quad
from scipy.stats import norm

from lowband.cost.stragglers import largest_of, slower
from lowband.predict.request import Grid, setting
from lowband.predict.show.record import flat
from lowband.predict.time import COMPUTED, StepTime, step_time
from lowband.predict.workload import Workload
from lowband.spec.axes import Ways
from lowband.spec.sourced import Fact
from tests.checkout import CONFIG


@pytest.mark.parametrize(("draws", "near"), [(1, 1e-12), (2, 0.05), (8, 0.01), (384, 0.01), (75264, 0.01)])
def test_the_largest_of_normal_draws(draws: int, near: float) -> None:
    """The mean of the density n phi(x) Phi(x)^(n - 1)."""
    mean, _ = quad(lambda x: x * draws * norm.pdf(x) * norm.cdf(x) ** (draws - 1), -9, 9, limit=200)
    assert largest_of(draws) == pytest.approx(mean, rel=near, abs=1e-9)


@given(ranks=st.integers(1, 10**6), more=st.integers(1, 10**6), spread=st.floats(1e-6, 0.5))
def test_more_ranks_and_a_wider_spread_wait_longer(ranks: int, more: int, spread: float) -> None:
    assert slower(1, spread) == slower(ranks, 0) == 0
    assert slower(ranks, spread) < slower(ranks + more, spread)
    assert slower(ranks + more, spread) < slower(ranks + more, 2 * spread)


def step(ranks: int, spread: float | None, scheme: str = "zero3", **options: object) -> StepTime:
    machine, stack = setting(CONFIG, "cuda", "ours")
    fact = None if spread is None else Fact(value=spread, source="made up")
    machine = machine.model_copy(update={"device": machine.device.model_copy(update={"speed_spread": fact})})
    model = CONFIG.model("gpt-2.7b")
    return step_time(Workload(machine, stack, model, CONFIG.scheme(scheme), ranks, 4, 2048, **options))  # type: ignore[arg-type]


@pytest.mark.parametrize("ranks", [8, 64, 2048])
def test_a_step_computes_as_long_as_its_slowest_device(ranks: int) -> None:
    """On one rank nothing; where communication waits behind computation, not all of it lengthens the step."""
    even, uneven = step(ranks, None), step(ranks, 0.02)
    computed = sum(even.items[name] for name in COMPUTED)
    assert uneven.items["straggler"] == pytest.approx(slower(ranks, 0.02) * computed, rel=1e-12)
    assert [uneven.items[name] for name in COMPUTED] == [even.items[name] for name in COMPUTED]
    assert sum(uneven.items.values()) == pytest.approx(uneven.total, rel=1e-12)
    assert 0 < uneven.total - even.total <= uneven.items["straggler"] * (1 + 1e-9)
    assert uneven.lane == even.lane
    assert step(1, 0.02, "ddp").total == step(1, None, "ddp").total


def test_a_pipeline_s_bubble_waits_too() -> None:
    even, uneven = (step(16, spread, "ddp", axes=Ways(pipeline=4), accumulation=8) for spread in (None, 0.02))
    assert uneven.items["bubble"] > even.items["bubble"]
    assert uneven.total > even.total + uneven.items["straggler"]


def test_a_grid_equals_its_points() -> None:
    together = step(64, 0.02, accumulation=np.array([1, 8])).total
    assert [*np.ravel(together)] == [step(64, 0.02, accumulation=m).total for m in (1, 8)]


def test_it_is_a_default_of_devices_whose_products_were_fitted_to_no_whole_step() -> None:
    """A fit to whole steps has the wait in the share of the peak; ranks that share a host have no devices."""
    for cluster in CONFIG.clusters:
        machine, _ = setting(CONFIG, cluster, "ours")
        products = machine.device.matmul_efficiency
        fitted = products is not None and bool(products.calibrated_on)
        own = machine.device.memory_gib is not None
        assert (machine.device.speed_spread is not None) == (own and not fitted), cluster


def test_a_prediction_shows_it_apart() -> None:
    records = Grid(
        CONFIG, "cuda", ["gpt-2.7b"], ["zero3"], [1, 8, 2048], [4], [1], [2048], ["full"]
    ).records()
    shares = [row["time_s"]["straggler"] / sum(row["time_s"][name] for name in COMPUTED) for row in records]
    assert shares == pytest.approx([0, 0.015 * 1.434, 0.015 * 3.427], rel=1e-3)
    assert all("time_s.straggler" in flat(row) for row in records)
    assert "device.speed_spread" in flat(records[0])["constants.default"].split()
