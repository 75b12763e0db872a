"""Shaped links: never faster than the closed form, counted by the kernel as by the ledger."""

import json
from pathlib import Path

import pandas as pd
import pytest
from commands import lowband

from lowband.cost.tcp import WIRE_BYTES_PER_BYTE
from lowband.spec.records import Environment, Outcome
from lowband.spec.run import RunSpec
from lowband.spec.run_folder import RunFolder
from tests.checkout import CONFIG, ROOT

pytestmark = pytest.mark.usefixtures("shaped")


@pytest.mark.timed("collectives on shaped links")
def test_collectives_take_what_the_links_take(tmp_path: Path) -> None:
    """Each level's hop alone on 16 ranks: 2, 4 and 2 partners. That links are not slower than this either is
    measured in a benchmark (docs/scale-model.md): a loaded machine may always take longer."""
    done = lowband(
        "bench-comm", "--ranks", "16", "--seconds", "0.5", "--repeats", "1", "--out", str(tmp_path), cwd=ROOT
    )
    assert done.returncode == 0, done.stderr
    rows = pd.read_csv(tmp_path / "comm.csv")
    assert set(rows.level) == {"package", "node", "world"}
    assert (rows.took_s > 0.95 * rows.closed_form_s).all(), rows
    # Some may still be in a buffer after a rank has received all; headers and gloo's own words add.
    over = rows.interface_bytes / rows.bytes
    assert over.between(0.7, 1.03 * WIRE_BYTES_PER_BYTE + 6_000 / rows.bytes, inclusive="neither").all(), rows


@pytest.mark.wide
def test_ways_to_experts_are_counted_on_shaped_links(tmp_path: Path) -> None:
    """Rows over the slow links: of flat and hops as many as pairs, of merged a token once; and with copies of
    popular experts fewer, on ranks that are more equally loaded."""
    done = lowband(
        "bench-routes",
        "--ranks",
        "16",
        "--seconds",
        "0.1",
        "--repeats",
        "1",
        "--out",
        str(tmp_path),
        cwd=ROOT,
    )
    assert done.returncode == 0, done.stderr
    rows = pd.read_csv(tmp_path / "routes.csv")
    assert set(rows.route) == {"flat", "hops", "merged"}
    alike = rows[(rows["skew"] == 0) & (rows.copies == 0)]
    assert (alike.slow_rows - alike.expected_rows).abs().max() < 0.25 * alike.expected_rows.max()
    routes = rows[rows.top_k == 8].set_index(["route", "row_bytes", "skew"]).slow_rows
    assert (routes["flat"] == routes["hops"]).all()
    assert (3 * routes["merged"] < routes["flat"]).all()
    skewed = rows[rows["skew"] == 1.5].set_index("copies")
    assert skewed.slow_rows[4] < skewed.slow_rows[0]
    assert skewed.load[4] < skewed.load[0]


def box_run(folder: Path, **changes) -> RunFolder:
    spec = next(spec for spec in CONFIG.runs(["links"]) if spec.scheme.name == "hier3")
    small = {"ranks": 4, "steps": 2, "warmup_steps": 1, "micro_batch": 4}
    spec = RunSpec.parse({**spec.model_dump(), **small, **changes}, "test")
    (folder / "spec.json").write_text(spec.to_json())
    return RunFolder(folder)


@pytest.fixture(scope="module")
def shaped_run(shaped: None, tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    folder = box_run(tmp_path_factory.mktemp("shaped"))
    done = lowband("train", str(folder.spec))
    assert done.returncode == 0, done.stderr
    return folder


@pytest.mark.timed("a busy machine does not keep the computation's pace")
def test_a_run_makes_its_own_links(shaped_run: RunFolder) -> None:
    outcome, steps = Outcome.read_json(shaped_run.outcome), list(shaped_run.read_steps())
    assert outcome.status == "ok", outcome.cause
    assert Environment.read_json(shaped_run.env).links == "shaped"
    logical = sum(sent.bytes for step in steps for sent in step.sent)
    assert logical < outcome.interface_bytes < 1.2 * logical + 100_000
    assert all(step.real_share > 0 for step in steps)


@pytest.mark.timed("a busy machine does not keep the computation's pace")
def test_links_change_times_and_not_results(shaped_run: RunFolder, tmp_path: Path) -> None:
    plain = box_run(tmp_path)
    assert lowband("train", str(plain.spec), "--links", "plain").returncode == 0
    assert Environment.read_json(plain.env).links.startswith("plain loopback, not shaped")
    outcomes = [Outcome.read_json(folder.outcome) for folder in (shaped_run, plain)]
    assert [outcome.status for outcome in outcomes] == ["ok", "ok"], outcomes
    assert outcomes[0].weights_sha256 == outcomes[1].weights_sha256 != ""
    assert outcomes[1].interface_bytes is None


def test_too_much_real_computation_is_refused(tmp_path: Path) -> None:
    folder = box_run(tmp_path)
    spec = json.loads(folder.spec.read_text())
    spec["machine"]["box"]["scale"] = 1.0  # the machine itself: no core computes 77 TFLOPS
    folder.spec.write_text(json.dumps(spec))
    assert lowband("train", str(folder.spec), "--links", "plain").returncode == 0
    outcome = Outcome.read_json(folder.outcome)
    assert outcome.status == "overloaded"
    assert "of the paced time at step 2; at most 80% keeps the speed constant" in outcome.cause


def test_more_ranks_than_the_box_has(tmp_path: Path) -> None:
    folder = box_run(tmp_path)
    spec = json.loads(folder.spec.read_text()) | {"ranks": 64}
    folder.spec.write_text(json.dumps(spec))
    done = lowband("train", str(folder.spec))
    assert done.returncode == 2
    assert "the box of frontier-box has 32 ranks" in done.stderr
