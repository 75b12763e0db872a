"""docs/benchmarks.md says what the shipped results say."""

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
