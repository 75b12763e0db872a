"""Softmax from raw rows to graded claims, every number known beforehand; and the benchmark on small sizes."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import yaml
from report_runs import write_softmax

from lowband.cost.softmax import ALGORITHMS, PASSES
from lowband.evidence.report.claim_views import write_claims
from lowband.evidence.report.figures import write_figure
from lowband.evidence.tables.build import write_table
from lowband.kernels.softmax_cpu import ISAS, missing
from lowband.spec.csv_tables import read_table
from lowband.spec.softmax import TORCH
from tests.called import called
from tests.checkout import REFERENCE, ROOT

MIB = 2**20 // 4  # elements of 1 MiB, which is the whole last cache
TIMES = {
    "two-pass": [1.0, 2.0, 1.0],
    "three-pass recompute": [1.5, 3.0, 9.0],  # 1.5, 1.5 and 9 times two-pass
    "three-pass reload": [1.2, 9.0, 1.2],
    "read": [0.25, 0.25, 0.25],
    "scale": [0.5, 0.5, 9.0],
    "scale in place": [0.375, 0.375, 0.375],
    TORCH: [4.0, 4.0, 4.0],
}
SIZES = {MIB // 2: "in cache", 2 * MIB: "between", 4 * MIB: "out of cache", 8 * MIB: "out of cache"}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    slower = {MIB // 2: 1, 2 * MIB: 1, 4 * MIB: 1, 8 * MIB: 2}  # all alike
    times = {
        (name, n): [slower[n] * time for time in several] for n in SIZES for name, several in TIMES.items()
    }
    write_softmax(tmp_path, times)
    write_table("softmax", tmp_path)
    return tmp_path


def rows(folder: Path, **where: object) -> pd.DataFrame:
    table = read_table(folder / "softmax.csv")
    for column, value in where.items():
        table = table[table[column] == value]
    return table


def test_medians_limits_and_ratios(folder: Path) -> None:
    [two_pass] = rows(folder, algorithm="two-pass", isa="AVX2", elements=4 * MIB).to_dict("records")
    assert (two_pass["n"], two_pass["time_s"], two_pass["regime"]) == (3, 1.0, "out of cache")
    assert two_pass["traffic_bytes"] == two_pass["bytes_per_s"] == 3 * 4 * 4 * MIB
    assert two_pass["limit_s"] == two_pass["of_limit"] == 0.75  # read, scale
    assert two_pass["gain_percent"] == pytest.approx(20)  # over the faster one, in the median repeat
    [reload] = rows(folder, algorithm="three-pass reload", elements=4 * MIB).to_dict("records")
    assert reload["over_two_pass"] == 1.2
    assert reload["limit_s"] == 1.125  # read, scale, scale in place
    [recompute] = rows(folder, algorithm="three-pass recompute", elements=8 * MIB).to_dict("records")
    assert recompute["over_two_pass"] == 1.5
    assert recompute["over_two_pass_q80"] == pytest.approx(6)
    assert recompute["limit_s"] == 2.0  # read, read, scale, twice as slow
    measured = rows(folder, provenance="measured", isa="AVX2")
    assert dict(zip(measured["elements"], measured["regime"], strict=True)) == SIZES
    assert (measured["device"] == "made up").all()
    [torch] = rows(folder, algorithm=TORCH, elements=4 * MIB).to_dict("records")
    assert torch["time_s"] == 4
    assert pd.isna([torch[column] for column in ("traffic_bytes", "limit_s", "over_two_pass")]).all()


def test_what_did_not_run_and_what_is_reported_are_rows(folder: Path) -> None:
    absent = rows(folder, isa="AVX512", provenance="measured")
    assert set(absent["status"] + ": " + absent["cause"]) == {"not run: no AVX-512 here"}
    assert set(absent["algorithm"]) == set(ALGORITHMS)
    reported = rows(folder, provenance="reported").set_index("isa")["gain_percent"]
    assert dict(reported) == {"AVX512": 28, "AVX2": 18}


def graded(folder: Path, runs: Path | None = None) -> pd.DataFrame:
    """The claims that are tried on softmax, against these tables. runs: default: one of a made-up machine"""
    claims = yaml.safe_load((ROOT / "config" / "claims.yaml").read_text(encoding="utf-8"))
    mine = {name: claim for name, claim in claims.items() if claim.get("ours", {}).get("table") == "softmax"}
    (folder / "config").mkdir()
    (folder / "results").symlink_to(ROOT / "results")
    (folder / "config" / "claims.yaml").write_text(yaml.safe_dump(mine))
    (folder / "config" / "experiments.yaml").symlink_to(ROOT / "config" / "experiments.yaml")
    made_up = "run_id,suite,provenance,device,commit\nr1,default,measured,made up,c0ffee\n"
    (folder / "runs.csv").write_text(runs.read_text() if runs else made_up)  # default: made with softmax
    write_claims(folder / "config" / "claims.yaml", folder, folder, root=ROOT)
    return read_table(folder / "claims.csv").set_index("id")


def test_claims_are_graded_from_the_table(folder: Path) -> None:
    claims = graded(folder)
    assert claims.loc["two-pass-faster-than-recompute", ["verdict", "ours"]].tolist() == ["met", 1.5]
    assert claims.loc["two-pass-faster-than-reload", ["verdict", "ours"]].tolist() == ["met", 1.2]
    assert claims.loc["two-pass-softmax-avx2", ["verdict", "origin"]].tolist() == ["met", "this run"]
    assert claims.loc["two-pass-softmax-avx2", "ours"] == pytest.approx(20)
    assert claims.loc["two-pass-softmax-avx2", "reported"] == 18
    assert claims.loc["two-pass-softmax-avx512", ["verdict", "why"]].tolist() == [
        "not run",
        "no AVX-512 here",
    ]


def test_a_slower_two_pass_falls_short(tmp_path: Path) -> None:
    times = {(name, 4 * MIB): several for name, several in TIMES.items()}
    write_softmax(tmp_path, {**times, ("two-pass", 4 * MIB): [1.3, 2.6, 1.3]})
    write_table("softmax", tmp_path)
    claims = graded(tmp_path)
    assert claims.loc["two-pass-faster-than-recompute", "verdict"] == "met"
    assert (
        claims.loc[["two-pass-faster-than-reload", "two-pass-softmax-avx2"], "verdict"].tolist()
        == ["not met"] * 2
    )


def test_two_machines_are_never_one_row(tmp_path: Path) -> None:
    """Shipped: a folder for each machine, of which the AVX2 one is three times as fast."""
    times = {(name, n): several for name, several in TIMES.items() for n in (MIB // 2, 4 * MIB)}
    write_softmax(tmp_path / "raw" / "first", {key: [t / 3 for t in ts] for key, ts in times.items()})
    slow = {**times, ("three-pass recompute", 4 * MIB): [1.3, 2.6, 1.3]}
    slow["three-pass reload", 4 * MIB] = [1.25, 2.5, 1.25]
    write_softmax(tmp_path / "raw" / "second", slow, "AVX512", "another")
    write_table("softmax", tmp_path / "raw", tmp_path)
    two_pass = rows(tmp_path, algorithm="two-pass", provenance="measured", status="ok", elements=4 * MIB)
    found = two_pass.set_index("cluster")[["device", "isa", "time_s", "n"]].to_dict("index")
    assert found["first"] == {"device": "made up", "isa": "AVX2", "time_s": pytest.approx(1 / 3), "n": 3}
    assert found["second"] == {"device": "another", "isa": "AVX512", "time_s": 1, "n": 3}
    write_figure("softmax", tmp_path, tmp_path / "figures")
    drawn = read_table(tmp_path / "figures" / "softmax.csv")
    assert set(drawn["device"]) >= {"made up", "another"}


def test_several_machines_are_graded_by_the_worst(tmp_path: Path) -> None:
    """An instruction set that two machines have: no largest gain over both."""
    times = {(name, 4 * MIB): several for name, several in TIMES.items()}
    write_softmax(tmp_path / "raw" / "first", times)
    slow = {**times, ("three-pass reload", 4 * MIB): [1.1, 2.2, 1.1]}
    write_softmax(tmp_path / "raw" / "second", slow, device="another")
    write_table("softmax", tmp_path / "raw", tmp_path)
    claim = graded(tmp_path).loc["two-pass-softmax-avx2"]
    assert (claim["verdict"], claim["values"]) == ("not met", "20, 10")
    assert claim["ours"] == pytest.approx(10)


def test_the_avx512_claim_stands_on_the_shipped_avx512_machine(tmp_path: Path) -> None:
    """Our value against numpy's medians of the raw times; machine and commit as in its environment."""
    shipped = REFERENCE / "softmax"
    environments = {path.parent: json.loads(path.read_text()) for path in shipped.glob("*/softmax_env.json")}
    [(folder, environment)] = [
        (folder, found)
        for folder, found in environments.items()
        if any(isa["isa"] == "AVX512" and isa["status"] == "ok" for isa in found["isas"])
    ]
    assert len(environments) == 2
    raw = pd.read_csv(folder / "softmax_times.csv")
    raw = raw[(raw["isa"] == "AVX512") & (4 * raw["elements"] >= 4 * environment["caches_bytes"]["last"])]
    gains = []
    for _, size in raw.groupby("elements"):
        by_repeat = size.pivot_table("time_s", "repeat", "algorithm")
        over = [by_repeat[name] / by_repeat["two-pass"] for name in ALGORITHMS if name != "two-pass"]
        gains.append(100 * (min(np.median(ratio) for ratio in over) - 1))
    write_table("softmax", shipped, tmp_path)
    claims = graded(tmp_path, runs=REFERENCE / "local" / "tables" / "runs.csv")
    claim = claims.loc["two-pass-softmax-avx512"]
    assert claim["ours"] == pytest.approx(max(gains))
    assert (claim["verdict"], claim["origin"]) == ("met", "shipped")
    machine, _, commit = claim["rows_from"].rsplit(", ", 2)
    assert (machine, commit) == (environment["device"], environment["commit"][:7])
    both = claims.loc["two-pass-softmax-avx2", "rows_from"]
    assert all(found["device"] in both and found["commit"][:7] in both for found in environments.values())


def lowband(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return called(sys.executable, "-c", code, **environment)


@pytest.mark.skipif(bool(missing("AVX2")), reason="no AVX2 here")
def test_every_round_calls_everything_once() -> None:
    result = lowband(
        "import json\n"
        "from lowband.bench.softmax import measure\n"
        "times, setups, environment = measure([1000, 4096])\n"
        "print(json.dumps([times, setups, environment]))"
    )
    assert result.returncode == 0, result.stderr
    times, setups, environment = json.loads(result.stdout)
    calls = pd.DataFrame(times, columns=["isa", "algorithm", "elements", "repeat", "time_s"])
    assert (calls["time_s"] > 0).all()
    here = [isa for isa in ISAS if not missing(isa)]
    for _, once in calls.groupby(["elements", "repeat"]):
        assert len(once) == len(here) * len([*ALGORITHMS, *PASSES]) + 1
        assert not once.duplicated(["isa", "algorithm"]).any()
    orders = calls.groupby(["elements", "repeat"])["algorithm"].agg(tuple)
    assert orders.nunique() > len(orders) / 2  # never one algorithm always after the same other
    assert [row[1] for row in setups] == ["ok" if isa in here else "not run" for isa in ISAS]
    assert environment["caches_bytes"]["l1"] > 0
    assert environment["commit"]


def test_without_a_compiler_everything_else_goes_on(tmp_path: Path) -> None:
    call = f"main(['bench-softmax', '--out', {str(tmp_path)!r}])"
    result = lowband(f"from lowband.__main__ import main; raise SystemExit({call})", PATH=str(tmp_path))
    assert result.returncode == 0, result.stderr
    write_table("softmax", tmp_path)
    absent = rows(tmp_path, isa="AVX2", provenance="measured")
    assert set(absent["status"]) == {"not run"}
    [cause] = set(absent["cause"])
    assert cause in {"no C compiler (allowed: gcc, clang, cc)", "no AVX2 here"}
    assert (graded(tmp_path)["verdict"] == "not run").all()
    write_figure("softmax", tmp_path, tmp_path / "figures")
    assert (tmp_path / "figures" / "softmax.png").stat().st_size > 0
