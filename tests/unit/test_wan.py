"""Loss against time on slow links: step times measured or predicted, joined with losses, by hand."""

import pandas as pd
import pytest

from lowband.cost.bytes import unit_numels
from lowband.cost.seldom import utilization
from lowband.evidence.tables.derived import wan, wan_curves
from lowband.evidence.validation.wan import RATES, SUITES, wan_steps
from tests.checkout import CONFIG

STEPS = 60
OK = {"status": "ok"}
POINT = {
    "point": "p", "provenance": "measured", "cluster": "local-nodes", "engine": "lowband",
    "model": "gpt-200k", "seq_len": 64, "compute_dtype": "fp32", "condition": "-",
    "global_batch": 8, "ranks": 2,
}  # fmt: skip


def test_without_delay_the_predictor_is_the_closed_form() -> None:
    rows = wan_steps(CONFIG).set_index(["scheme", "outer_link_bits_per_s"])
    specs = {spec.scheme.name: spec for spec in CONFIG.runs(SUITES)}
    assert len(rows) == len(specs) * len(RATES)
    for scheme in ("local-sgd", "slowmo", "diloco"):
        spec = specs[scheme]
        sync = spec.scheme.sync
        numel = sum(unit_numels(spec.model, spec.levels))
        at_no_cost = rows.loc[(scheme, 1e11), "step_time_s"]
        for rate in RATES[1:]:
            row = rows.loc[(scheme, rate)]
            # Two replicas of one rank: each sends half of its differences, then half of the updates, in fp32.
            exchange_s = 4 * numel / row["outer_link_bytes_per_s"]
            behind = at_no_cost - exchange_s * rate / 1e11 / sync.every  # a step without exchanges
            share = utilization(sync.every * behind, exchange_s)
            assert behind / row["step_time_s"] == pytest.approx(share, rel=1e-6)


def raw_tables() -> tuple[pd.DataFrame, pd.DataFrame, pd.DataFrame]:
    """hsdp's loss falls by 0.1 a step from 8; diloco's lags by 0.5, with the second seed by 0.01 more.

    hsdp takes 10 s a step by prediction; diloco was measured at 2 s, predicted at 1 s. 0.5 s computes.
    """
    steps, runs = [], []
    for scheme, lag in (("hsdp", 0.0), ("diloco", 0.5)):
        for repeat in (1, 2):
            more = 0.01 * (repeat - 1) if scheme == "diloco" else 0.0
            loss = [8 - 0.1 * step + lag + more for step in range(1, STEPS + 1)]
            run = f"wan-{scheme}-{repeat}"
            named = {"run_id": run, "suite": "wan", "scheme": scheme, "repeat": repeat}
            runs.append({**named, **OK, **POINT, "outer_link_bytes_per_s": None})
            steps += [
                {"run_id": run, "step": step, "loss": value, "is_warmup": False, "step_time_s": 0.1}
                for step, value in enumerate(loss, 1)
            ]
    box = {"run_id": "box", "suite": "wan-200", "scheme": "diloco", "repeat": 1, **OK, **POINT}
    runs.append({**box, "cluster": "wan-box", "outer_link_bytes_per_s": 12.5 + 1e-12})
    steps += [
        {"run_id": "box", "suite": "wan-200", "scheme": "diloco", "repeat": 1, "step": step,
         "loss": 9.0, **POINT, "is_warmup": step == 1, "step_time_s": seconds}
        for step, seconds in ((1, 100.0), (2, 1.0), (3, 3.0))
    ]  # fmt: skip
    predicted = [
        {"scheme": scheme, "outer_link_bits_per_s": 1e7, "outer_link_bytes_per_s": 12.5,
         "step_time_s": seconds, "compute_time_s": 0.5}
        for scheme, seconds in (("hsdp", 10.0), ("diloco", 1.0))
    ]  # fmt: skip
    return pd.DataFrame(runs), pd.DataFrame(steps), pd.DataFrame(predicted)


def test_measured_times_come_before_predicted_ones() -> None:
    curves = wan_curves.build(*raw_tables())
    assert (curves["seeds"] == 2).all()
    assert set(curves["step"]) == set(range(20, STEPS + 1, 4))  # the first full window ends at step 20
    by_scheme = curves.set_index(["scheme", "step"])
    assert by_scheme.loc[("hsdp", 40), "time_s"] == 400
    assert by_scheme.loc[("hsdp", 40), "provenance"] == "predicted"
    assert by_scheme.loc[("diloco", 40), "time_s"] == 80  # the mean of 1 s and 3 s; warm-up left out
    assert by_scheme.loc[("diloco", 40), "provenance"] == "measured"
    # Mean over steps 21 to 40: 8 - 3.05 + 0.5, and 0.01 more for the second seed.
    assert by_scheme.loc[("diloco", 40), "loss"] == pytest.approx(5.455)
    assert by_scheme.loc[("diloco", 40), "loss_high"] == pytest.approx(5.46)


def test_who_is_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wan, "TARGET", 5.0)
    table = wan.build(*raw_tables()).set_index("scheme")
    assert list(table["utilization"]) == [0.05, 0.25]
    assert list(table["predicted_utilization"]) == [0.05, 0.5]
    # 8 - 0.1 (n - 9.5) <= 5 at n = 40 for hsdp; 0.5 above and 0.005 in the mean at n = 48.
    assert table.loc["hsdp", ["target_steps", "target_s"]].tolist() == [40, 400]
    assert table.loc["diloco", ["target_steps", "target_s"]].tolist() == [48, 96]
    assert table.loc["hsdp", "over_first"] == pytest.approx(400 / 96)
    assert table.loc["diloco", "difference"] == pytest.approx(0.505)
    assert table.loc["diloco", "difference_max"] == pytest.approx(0.51)
    # diloco ends after 120 s, when hsdp has taken 12 steps: no full window.
    assert pd.isna(table.loc["hsdp", "equal_time_loss"])
    assert table.loc["diloco", "equal_time_steps"] == STEPS
