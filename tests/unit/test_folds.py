"""Cross-validation: folds of `lowband calibrate --folds`, and the intervals that they give."""

import math

import numpy as np
import pandas as pd
import pytest
from scipy.stats import norm

from lowband.errors import UserError
from lowband.evidence.tables.derived import coverage
from lowband.evidence.validation import FITTED, KINDS, SOURCES
from lowband.evidence.validation.fit import rows_with, solve
from lowband.evidence.validation.folds import cross_validate
from lowband.evidence.validation.intervals import (
    MEMORY,
    beyond,
    by_source,
    calibrated_factors,
    covered,
    factor,
    rows_of_times,
)
from lowband.evidence.validation.validate import with_facts
from lowband.predict.interval import ELSEWHERE, KNOWN
from lowband.spec.csv_tables import read_table
from tests.checkout import CONFIG, REFERENCE

SHIPPED = REFERENCE / "predicted"


@pytest.fixture(scope="module")
def eos() -> tuple[pd.DataFrame, pd.DataFrame]:
    return cross_validate(CONFIG, ["eos-2024"])


def test_shipped_folds_are_what_the_command_writes(eos: tuple[pd.DataFrame, pd.DataFrame]) -> None:
    """On one machine; a change of the model or of a constant needs new folds."""
    for made, name in zip(eos, ("folds", "held_out"), strict=True):
        shipped = read_table(SHIPPED / f"{name}.csv")
        shipped = shipped[shipped["source"] == "megatron-h100"].reset_index(drop=True)
        pd.testing.assert_frame_equal(made.replace("", np.nan), shipped, check_dtype=False, rtol=1e-6)


def test_a_fold_is_fitted_on_the_other_rows_alone(eos: tuple[pd.DataFrame, pd.DataFrame]) -> None:
    """Against a fit on the model itself, without interpolation."""
    source = SOURCES["megatron-h100"]
    machine, stack = source.on(CONFIG)
    constants = {place: fact for place, fact in (machine.facts | stack.facts).items() if fact.calibrated_on}

    def errors(values: dict[str, float]) -> list[float]:
        rows = [row for row in rows_with(CONFIG, source, values) if row.size != "177B"]
        return [float(row.predicted()) / row.published - 1 for row in rows]

    direct = solve(constants, errors)
    fold = eos[0].query("kind == 'size' and left_out == '177B'").iloc[0]
    stated = dict(part.split(" = ") for part in fold["values"].split(" ; "))
    for place, value in direct.items():
        assert float(stated[place]) == pytest.approx(value, rel=0.01)
    [held] = eos[1].query("kind == 'size' and left_out == '177B'").to_dict("records")
    [row] = [row for row in rows_with(CONFIG, source, direct) if row.size == "177B"]
    assert held["predicted"] == pytest.approx(float(row.predicted()), rel=0.005)
    assert (fold["rows"], fold["fitted_rows"], fold["constants"]) == (1, 8, 2)


def test_every_row_is_left_out_once_by_each_kind_of_fold() -> None:
    """Or its fold says why it cannot be fitted."""
    folds, held = read_table(SHIPPED / "folds.csv"), read_table(SHIPPED / "held_out.csv")
    for name, source in SOURCES.items():
        rows = sorted(row.id for row in source.rows(CONFIG, *source.on(CONFIG)))
        for kind in KINDS:
            of_kind = folds[(folds["source"] == name) & (folds["kind"] == kind)]
            assert of_kind["rows"].sum() == len(rows), (name, kind)
            fitted = of_kind[of_kind["outcome"] == FITTED]
            out = held[(held["source"] == name) & (held["kind"] == kind)]["row"]
            assert len(out) == out.nunique() == fitted["rows"].sum()
            assert set(out) <= set(rows)
            assert (fitted["fitted_rows"] >= fitted["constants"]).all()
    why = set(folds["outcome"])
    assert {FITTED, "fewer rows than constants", "the only size", "nothing was fitted on it"} <= why


def test_a_machine_without_published_runs_is_refused() -> None:
    with pytest.raises(UserError, match="no published run is predicted on 'local'"):
        cross_validate(CONFIG, ["local"])


def test_constants_on_a_grid_predict_as_one_by_one() -> None:
    source = SOURCES["zeropp"]
    machine, stack = source.on(CONFIG)
    places = ("device.matmul_efficiency", "stack.overlap", "world.efficiency_by_cards.8")
    values = [(0.5, 0.2, 0.3), (0.8, 0.9, 0.5)]
    arrays = {
        place: np.array(column) for place, column in zip(places, zip(*values, strict=True), strict=True)
    }
    together = source.rows(CONFIG, *with_facts(machine, stack, arrays))
    for i, one in enumerate(values):
        alone = source.rows(CONFIG, *with_facts(machine, stack, dict(zip(places, one, strict=True))))
        for row, same in zip(together, alone, strict=True):
            assert np.ravel(row.predicted())[i] == pytest.approx(float(same.predicted()), rel=1e-12)


@pytest.mark.parametrize(("n", "nth"), [(4, 4), (9, 8), (19, 16), (99, 80)])
def test_the_factor_of_an_interval(n: int, nth: int) -> None:
    """The k-th smallest error, k = ceil(0.8 (n + 1))."""
    errors = [i / 100 for i in range(n, 0, -1)]
    assert factor(errors) == pytest.approx(math.exp(nth / 100))


def test_too_few_errors_give_no_interval() -> None:
    assert math.isnan(factor([0.1, 0.2, 0.3]))


def test_a_rows_interval_does_not_know_the_row() -> None:
    """Nor any other row of its size or its scale."""
    folds, held = read_table(SHIPPED / "folds.csv"), read_table(SHIPPED / "held_out.csv")
    key = ("megatron-h100", "megatron-h100: 177B")
    changed = held.copy()
    changed.loc[(held["source"] == key[0]) & (held["row"] == key[1]), "predicted"] *= 3
    before, after = (
        covered(folds, rows, 0.8).set_index(["source", "row", "kind"]).loc[(*key, "size")]
        for rows in (held, changed)
    )
    assert after["factor"] > 2 > before["factor"]
    assert after["interval_factor"] == before["interval_factor"]


def test_the_files_have_the_factors_of_the_rows_left_out() -> None:
    folds, held = read_table(SHIPPED / "folds.csv"), read_table(SHIPPED / "held_out.csv")
    for (cluster, stack, unit), value in calibrated_factors(folds, held).items():
        if unit == "time":
            fact = CONFIG.stack_on(stack, cluster).error_factor
            assert fact is not None, (cluster, stack)
            assert fact.value == pytest.approx(value, abs=6e-4)


WHOLE = ("validation", "folds", "held_out", "published_recipes")


def test_80_percent_of_rows_of_sources_left_out_whole_are_inside() -> None:
    """In the mean over sources, and of all rows, most of which are vtrain's; no printed factor is smaller."""
    found = by_source(*(read_table(SHIPPED / f"{name}.csv") for name in WHOLE))
    found = found.set_index("source")
    means = found.loc["mean of sources"].fillna({"evidence": ""}).set_index("evidence")
    for evidence, printed in (("known", KNOWN), ("elsewhere", ELSEWHERE)):
        assert printed - 0.01 < means.loc[evidence, "factor"] <= printed
    assert 75 <= means.loc["", "inside"] <= 85
    assert 75 <= found.loc["all rows", "inside"] <= 85
    sources = found.drop(index=["mean of sources", "all rows"])
    assert means.loc["", "inside"] == pytest.approx(sources["inside"].mean())
    assert set(sources.index[sources["evidence"] == "known"]) == {
        "megatron", "seqpar", "vtrain",  # Megatron-LM of 2021 on A100
        "megatron-h100", "dgxc-nemo-h100", "NVIDIA/dgxc-benchmarking", "arXiv 2504.14960",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("source", "table", "beside"),
    [("zeropp", 2, "zeropp"), ("vtrain", 2, "vtrain"), ("torchtitan-h100", 0, "torchtitan-h200"),
     ("llm-foundry-h100", 2, "llm-foundry-a100"), ("dgxc-nemo-h100", 2, "NVIDIA/dgxc-benchmarking")],
)  # fmt: skip
def test_the_interval_of_a_source_left_out_whole_knows_none_of_its_publishers_rows(
    source: str, table: int, beside: str
) -> None:
    tables = [read_table(SHIPPED / f"{name}.csv") for name in WHOLE]
    before = by_source(*tables).set_index("source")
    changed = tables[table].copy()
    changed.loc[changed["source"] == source, ["predicted", "slow_host"]] *= 30
    after = by_source(*tables[:table], changed, *tables[table + 1 :]).set_index("source")
    assert after.loc[source, "inside"] == 0 < before.loc[source, "inside"]
    for one in (source, beside):
        assert after.loc[one, "factor"] == before.loc[one, "factor"]


def test_a_row_that_a_slow_host_explains_is_not_off() -> None:
    """Of times above the prediction, and of rates below it; behind the slowest host, what is left counts."""
    rows = pd.DataFrame(
        [("s/iteration", 1.5, 1, 2), ("s/iteration", 3, 1, 2), ("s/iteration", 0.5, 1, 2),
         ("tokens/s", 0.6, 1, 0.5), ("tokens/s", 0.25, 1, 0.5), ("tokens/s", 2, 1, math.nan)],
        columns=["quantity", "published", "predicted", "slow_host"],
    )  # fmt: skip
    assert np.exp(beyond(rows)).tolist() == pytest.approx([1, 1.5, 2, 1, 2, 2])


def test_80_percent_of_rows_left_out_with_their_size_are_inside() -> None:
    """What docs/predictor-errors.md says; of single machines 60 to 89 %."""
    inside = covered(read_table(SHIPPED / "folds.csv"), read_table(SHIPPED / "held_out.csv"))
    share = inside.assign(inside=inside["inside"].astype(float)).groupby("kind")["inside"].mean()
    assert 0.75 <= share["size"] <= 0.85
    assert 0.75 <= share["scale"] <= 0.85
    assert share["machine"] == pytest.approx(0.40, abs=0.01)


def test_stragglers_explain_no_more() -> None:
    """A step waits for the slowest of n devices whose speeds have a standard deviation of 1.5 %."""
    held = rows_of_times(*(read_table(SHIPPED / f"{name}.csv") for name in ("folds", "held_out")))
    held = held[(held["kind"] == "scale") & held["left_out"].str.fullmatch(r"\d+ GPUs")]
    held = held[held["quantity"] != MEMORY]
    n = held["left_out"].str.split().str[0].astype(float)
    sign = np.where(held["quantity"].str.contains("iteration"), 1, -1)
    slower = np.log1p(0.015 * norm.ppf((n - 0.375) / (n + 0.25)))  # Blom's largest of n normals
    held = held.assign(off=np.log(held["predicted"] / held["published"]) * sign, slower=slower)
    change = {}
    for source, rows in held.groupby("source"):
        after = []
        for scale, left in rows.groupby("left_out"):
            kept = rows[rows["left_out"] != scale]["slower"].mean()  # the fit has it in its constants
            after.append(left["off"] + left["slower"] - (0 if np.isnan(kept) else kept))
        change[source] = pd.concat(after).abs().mean() - rows["off"].abs().mean()
    assert sum(points > 0 for points in change.values()) >= 5
    assert min(change.values()) > -0.003


def test_coverage_is_the_share_of_rows_inside() -> None:
    """At 80 % as in the table of intervals; more is stated, more lies inside."""
    folds, held = read_table(SHIPPED / "folds.csv"), read_table(SHIPPED / "held_out.csv")
    found = coverage.build(folds, held)
    whole = found[found["cluster"] == coverage.ALL].pivot_table("inside", "level", "kind")
    inside = covered(folds, held).dropna(subset="inside")
    share = inside.assign(inside=inside["inside"].astype(float)).groupby("kind")["inside"].mean()
    assert whole.loc[0.8].to_dict() == pytest.approx(share.to_dict())
    assert (whole.diff().dropna() > 0).all().all()
    assert (whole[["size", "scale"]].sub(whole.index, axis=0).abs() < 0.06).all().all()
    parts = found[(found["cluster"] != coverage.ALL) & (found["level"] == 0.8)]
    assert (parts["rows"] * parts["inside"]).sum() == pytest.approx(inside["inside"].sum())
