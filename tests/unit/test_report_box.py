"""Tables of the scale model against numbers worked out by hand."""

import json
import os

import pandas as pd
import pytest

from lowband.box import jobs
from lowband.evidence.tables.build import builder
from lowband.evidence.tables.derived import box, box_ratios
from lowband.evidence.tables.points import same_but
from lowband.spec.records import Outcome
from lowband.spec.run_folder import RunFolder
from tests.checkout import CONFIG

REPORTED = pd.DataFrame(
    {
        "metric": ["TFLOPS per GPU gain", "TFLOPS per GPU gain, maximum", "TFLOPS per GPU gain"],
        "scheme": ["ZeRO++ ported to AMD", "proposed 3-level partitioning", "proposed 3-level partitioning"],
        "value": ["40.5", "139.8", "71"],
        "gcds": ["384", "384", "384"],
    }
)


def frame(runs: list[dict[str, object]]) -> pd.DataFrame:
    """The runs; those that agree in every option are one point."""
    df = pd.DataFrame(runs)
    df["machine_sum"] = df["outer_link_bytes_per_s"].astype(str)
    return df.assign(
        point=df[same_but(df)].astype(str).agg(" ".join, axis=1),
        global_batch=df["micro_batch"] * df["accumulation"] * df["ranks"],
    )


def run(scheme: str, ranks: int, step_time_s: float, **changes: object) -> dict[str, object]:
    """1,000 FLOP a token, 100 tokens a rank, every rate divided by 10."""
    return {
        "condition": "-", "scaling": "weak", "scheme_sum": scheme,
        "provenance": "measured", "suite": "box", "cluster": "b", "engine": "lowband", "model": "m",
        "seq_len": 10, "compute_dtype": "bf16", "micro_batch": 10, "accumulation": 1,
        "outer_link_bytes_per_s": 8.0, "overlap": True, "ranks": ranks, "scheme": scheme, "scale": 10,
        "status": "ok", "tokens_per_step": 100 * ranks, "model_flop_per_token": 1000.0,
        "step_time_s": step_time_s, "predicted_step_time_s": 2.0, "compute_time_s": 1.0,
        "exposed_comm_time_s": 0.5, "hidden_comm_time_s": 0.1, "real_share": 0.2, "interface_bytes": 107.0,
        "ledger_bytes": 100.0, "links": "shaped",
    } | changes  # fmt: skip


def test_a_point_is_the_median_of_its_repeats() -> None:
    times = {"zero3": (4.0, 5.0, 6.0), "zeropp": (2.5, 2.5, 2.5)}
    runs = [run(scheme, 16, time) for scheme, of in times.items() for time in of]
    runs += [run("zeropp", 8, 2.0), run("zeropp", 8, 9.0, status="overloaded")]
    points = box.build(frame(runs)).set_index(["scheme", "ranks"])
    zero3 = points.loc[("zero3", 16)]
    assert (zero3["repeats"], zero3["step_time_s"]) == (3, 5.0)
    assert (zero3["step_time_min_s"], zero3["step_time_max_s"]) == (4.0, 6.0)
    assert zero3["model_flop_per_s_per_rank"] == pytest.approx(100 * 1000 / 5)
    assert zero3["model_flop_per_s_per_rank_at_scale"] == pytest.approx(10 * 100 * 1000 / 5)
    assert zero3["prediction_error_percent"] == pytest.approx(150)
    assert points.loc[("zeropp", 16), "over_zero3"] == pytest.approx(2)
    assert points.loc[("zeropp", 16), "efficiency"] == pytest.approx(2 / 2.5)
    assert points.loc[("zeropp", 8), "repeats"] == 1


def test_orders_are_compared_with_depth_first_and_with_hier3_in_it() -> None:
    times = {("hier3", "depth"): 4.0, ("hier3", "breadth"): 3.0, ("planned", "breadth"): 2.0}
    runs = [run(scheme, 16, time, order=order) for (scheme, order), time in times.items()]
    points = box.build(frame(runs)).set_index(["scheme", "order"])
    assert points.loc[("hier3", "breadth"), "over_depth"] == pytest.approx(4 / 3)
    assert pd.isna(points.loc[("planned", "breadth"), "over_depth"])
    assert points.loc[("planned", "breadth"), "over_hier3_depth"] == 2
    assert points.loc[("hier3", "depth"), "over_hier3_depth"] == 1


def test_schemes_are_compared_under_the_same_condition() -> None:
    runs = [
        run(scheme, 16, time, accumulation=passes, outer_link_bytes_per_s=link)
        for scheme, factor in (("zero3", 4), ("zeropp", 2), ("hier3", 1))
        for passes, link, time in ((1, 8.0, factor), (2, 8.0, 2.0 * factor), (1, 4.0, factor**2))
    ]
    ratios = box_ratios.build(frame(runs), REPORTED)
    measured = ratios[ratios["provenance"] == "measured"]
    one = measured[measured["pair"] == "hier3 / zeropp"].set_index(["accumulation", "outer_link_share"])
    assert dict(one["ratio"]) == {(1, 1.0): 2.0, (2, 1.0): 2.0, (1, 0.5): 4.0}
    assert (one["ratio_low"] == one["ratio"]).all()  # one repeat
    reported = ratios[ratios["provenance"] == "reported"].set_index("pair")["ratio"]
    assert dict(reported) == pytest.approx(
        {"zeropp / zero3": 1.405, "hier3 / zero3": 2.398, "hier3 / zeropp": 1.71}
    )


def test_a_ratio_ranges_over_the_repeats_of_both_schemes() -> None:
    runs = [run(scheme, 16, time) for scheme, times in TWICE.items() for time in times]
    ratios = box_ratios.build(frame(runs), REPORTED).set_index("pair")
    row = ratios[ratios["provenance"] == "measured"].loc["hier3 / zeropp"]
    assert list(row[["ratio", "ratio_low", "ratio_high"]]) == pytest.approx([8 / 4, 7 / 5, 10 / 3])


TWICE = {"zeropp": (7.0, 8.0, 10.0), "hier3": (3.0, 4.0, 5.0)}


def test_collectives_are_held_to_the_closed_form_and_to_what_tcp_adds() -> None:
    row = {
        "cluster": "b",
        "ranks": 16,
        "level": "node",
        "collective": "gather",
        "partners": 4,
        "bytes": 1448000,
    }
    rows = [
        {
            **row,
            "repeat": i,
            "closed_form_s": 2.0,
            "took_s": took,
            "interface_bytes": 1000 * (1514 + 33) * more,
        }
        for i, (took, more) in enumerate([(2.0, 1.00), (2.06, 1.01), (2.2, 1.02)])
    ]
    rows.append({**rows[0], "bytes": 1448, "closed_form_s": 0.002})
    long, short = (row for _, row in builder("box_links")(pd.DataFrame(rows)).iterrows())
    assert (long["is_long"], short["is_long"], long["repeats"]) == (True, False, 3)
    assert long["time_error_percent"] == pytest.approx(3)
    assert long["time_over_closed_form_max"] == pytest.approx(1.1)
    assert long["interface_error_percent"] == pytest.approx(1)


def test_what_slurm_adds_is_the_median_over_jobs() -> None:
    times = pd.DataFrame(
        {"ranks": [16, 16, 16, 8], "nodes": [2, 2, 2, 1], "waited_s": [0.0, 1.0, 2.0, 0.0]}
        | {"before_s": [8.0, 9.0, 10.0, 7.0], "after_s": [3.0, 3.0, 4.0, 3.0]}
        | {"added_s": [11.0, 13.0, 16.0, 10.0], "wall_s": [50.0, 60.0, 70.0, 40.0]}
    )
    table = builder("box_jobs")(times).set_index("ranks")
    assert dict(table["added_s"]) == {8: 10.0, 16: 13.0}
    assert dict(table["jobs"]) == {8: 1, 16: 3}


def test_a_run_that_was_run_again_has_the_time_of_its_last_job(tmp_path, monkeypatch) -> None:
    spec = next(spec for spec in CONFIG.runs(["box"]) if spec.ranks == 16)
    folder = RunFolder(tmp_path / spec.run_id)
    folder.path.mkdir()
    folder.spec.write_text(spec.to_json())
    folder.write_outcome(Outcome(status="ok", steps=4))
    outcome = json.loads(folder.outcome.read_text()) | {"wall_s": 50.0}
    folder.outcome.write_text(json.dumps(outcome))
    os.utime(folder.outcome, (1160.0, 1160.0))
    ended = [(1000.0, 1000.0, 1040.0, spec.run_id), (1002.0, 1030.0, 1040.0, "other")]
    monkeypatch.setattr(jobs, "_ended_jobs", lambda: [*ended, (1050.0, 1101.0, 1163.0, spec.run_id)])
    [row] = jobs.job_times(tmp_path)
    assert (row.run_id, row.ranks, row.nodes) == (spec.run_id, 16, 2)
    assert row[3:] == (51.0, 9.0, 50.0, 3.0, 63.0)
