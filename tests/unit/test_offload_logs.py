"""Raw logs of Deep Optimizer States beside predictions: errors, signs of gains, the stride that is chosen."""

import re

import pandas as pd
import pytest

from lowband.evidence.validation.offload_fit import BOUNDS, SETTINGS, fitted
from lowband.evidence.validation.offload_logs import offload_constants, offload_logs, offload_strides
from tests.checkout import CONFIG


@pytest.fixture(scope="module")
def logs() -> pd.DataFrame:
    return offload_logs(CONFIG)


def test_every_log_is_predicted_once(logs: pd.DataFrame) -> None:
    assert len(logs) == len(set(logs["log"])) == 102
    assert logs["published_s"].between(1, 60).all()
    first = logs.set_index("log").filter(like="7B-scale-DP/log-7B-tp1-dp1-", axis=0)
    assert sorted(first["published_s"]) == [6.46245, 7.61704, 10.89644]


def test_what_is_held_out_is_predicted(logs: pd.DataFrame) -> None:
    held = logs[logs["use"] == "held out"]
    off = held["off_percent"].abs()
    assert len(held) == 81 and off.median() < 5
    of_model = off.groupby(held["model"]).median()
    assert of_model["7B"] < 10 and of_model["20B"] < 10 and of_model["8B"] < 17
    named = held["log"].str.contains("subg-size")  # their copies are not stated
    assert off[named].min() > 40 and off[~named].max() < 36


def test_the_gain_has_the_sign_of_the_logs_in_every_row(logs: pd.DataFrame) -> None:
    rows = logs[logs["system"] == "interleaved"]
    assert len(rows) == 30
    for of in ("gain", "gain_over_async"):
        published, predicted = rows[f"published_{of}_percent"], rows[f"predicted_{of}_percent"]
        assert published.notna().all() and ((published > 0) == (predicted > 0)).all()


def test_the_stride_of_the_model_is_never_slower_than_the_better_end() -> None:
    found = offload_strides(CONFIG)
    assert set(found["model"]) == {"7B", "8B"}
    assert (found["times_better_end"] <= 1).all()
    assert (found["chosen"] == found["best"]).all()


def test_constants_lie_in_their_bounds_and_only_node_efficiency_on_one() -> None:
    found = offload_constants(CONFIG)
    free = found[found["fitted"]]
    assert ((free["low"] <= free["value"]) & (free["value"] <= free["high"])).all()
    near = 0.01 * (free["high"] - free["low"])
    on_a_bound = free[(free["value"] < free["low"] + near) | (free["value"] > free["high"] - near)]
    assert [*zip(on_a_bound["setting"], on_a_bound["constant"], strict=True)] == [
        ("polaris", "node_efficiency")
    ]
    for of in SETTINGS.values():
        assert set(of.free) <= set(BOUNDS)


def test_polaris_has_the_update_rates_that_are_fitted() -> None:
    host = CONFIG.machine("polaris").tier("host")
    constants = fitted(CONFIG, "polaris")
    assert host.update_gigabytes_per_s is not None and host.node_update_gigabytes_per_s is not None
    assert host.update_gigabytes_per_s.value == pytest.approx(constants["update"], abs=0.05)
    assert host.node_update_gigabytes_per_s.value == pytest.approx(constants["node_update"], abs=0.05)


def test_fitted_logs_are_those_of_the_patterns(logs: pd.DataFrame) -> None:
    for name, of in SETTINGS.items():
        own = logs[logs["setting"] == name]
        fitted_on = own["log"].map(lambda log, pattern=of.fitted: bool(re.search(pattern, log)))
        assert (own["use"] == "calibration").equals(fitted_on)
        assert 4 <= fitted_on.sum() <= 11
