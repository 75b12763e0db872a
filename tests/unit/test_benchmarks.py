"""docs/benchmarks.md says what the shipped results say."""

import json
import re
from pathlib import Path

from lowband.report.files import read_table
from lowband.report.tables.peers import build

ROOT = Path(__file__).parents[2]


def test_peers_table_is_true() -> None:
    text = (ROOT / "docs" / "benchmarks.md").read_text(encoding="utf-8")
    [shown] = re.findall(r"<!-- peers:begin -->\n(.*?)<!-- peers:end -->", text, re.DOTALL)
    table = build(read_table(ROOT / "results" / "reference" / "peers" / "runs.csv"))
    rows = [
        f"| {r.scheme} | {r.ranks} | {r.compute_dtype} | {1e3 * r.step_time_s_ours:.0f} | "
        f"{1e3 * r.step_time_s_peer:.0f} | {r.step_time_ratio:.2f} | {r.memory_ratio:.2f} | "
        f"{r.loss_difference:.1e} |"
        for r in table.itertuples()
    ]
    assert shown.splitlines()[2:] == rows


def test_accuracy_table_is_true() -> None:
    text = (ROOT / "docs" / "predictor.md").read_text(encoding="utf-8")
    [shown] = re.findall(r"<!-- accuracy:begin -->\n(.*?)<!-- accuracy:end -->", text, re.DOTALL)
    rows = [
        f"| {r.source} | {r.use} | {r.rows} | {r.mean_error_percent:.1f} | {r.max_error_percent:.1f} |"
        for r in read_table(ROOT / "results" / "reference" / "predicted" / "accuracy.csv").itertuples()
    ]
    assert shown.splitlines()[2:] == rows


def test_the_predictor_is_as_fast_as_said() -> None:
    text = (ROOT / "docs" / "benchmarks.md").read_text(encoding="utf-8")
    bench = json.loads((ROOT / "results" / "reference" / "predicted" / "bench.json").read_text())
    assert f"{bench['grid_predictions_per_s']:,.0f} predictions a second" in text
    assert f"{bench['plan_candidates']:,} candidates in {bench['plan_cpu_s']:.1f} s" in text
