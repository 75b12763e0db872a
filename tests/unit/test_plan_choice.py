"""What a plan shows and writes: a row per placement, lossy wires where they pay; levels by position."""

import csv
import io
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from lowband.__main__ import main
from lowband.cost.numbers import GIB
from lowband.errors import UserError
from lowband.predict.request import setting
from lowband.predict.room import MEMORY_ERROR
from lowband.predict.search.candidates import KNOBS, MODEL_ERROR, WIRES, Candidate, Plan
from lowband.predict.search.choice import STATES, chosen, lossy_wires
from lowband.predict.search.degrees import axes_to_try, divisors
from lowband.predict.search.plan import jobs, plan
from lowband.predict.time import step_time
from lowband.predict.workload import Workload
from lowband.spec.axes import ONLY_DATA
from lowband.spec.config import Config
from lowband.spec.csv_tables import read_table
from lowband.spec.scheme import Scheme
from tests.checkout import CONFIG, REFERENCE, ROOT
from tests.printed import printed_by

MACHINE = CONFIG.machine("dgx-a100-40gb")
STACK = CONFIG.given_stack(None, MACHINE)
MEMORY = ("torchtitan-h100-memory", "torchtitan-h200-memory")


def candidate(weights: str, lossy: int, seconds: float) -> Candidate:
    wires = {name: pair[i < lossy] for i, (name, pair) in enumerate(WIRES.items())}
    scheme = Scheme(name="plan", weights=weights, grads="world", optim="world", **wires)
    job = Workload(MACHINE, STACK, CONFIG.model("gpt-1m"), scheme, 8, np.array([1]), 128, np.array([1]))
    values = {**vars(scheme), **vars(job), **vars(ONLY_DATA), "micro_batch": 1}
    return Candidate(tuple(values[knob] for knob in KNOBS), job, 1, 1, seconds, 0.0)


def rows_of(*candidates: Candidate) -> list[tuple[str, int, float]]:
    ranked = sorted(candidates, key=lambda one: one.step_time_s)
    found = chosen(Plan(ranked, {one.knobs: one for one in ranked}), error=0.1)
    return [(str(one.knobs[0]), lossy_wires(one), one.step_time_s) for one in found]


def test_lossy_wires_only_where_they_win_by_more_than_the_error() -> None:
    exact, near, far = candidate("world", 0, 1.0), candidate("world", 1, 0.92), candidate("world", 1, 0.9)
    assert rows_of(exact, near) == [("world", 0, 1.0)]
    assert rows_of(exact, far) == [("world", 1, 0.9)]
    # A further wire must pay for itself.
    assert rows_of(exact, far, candidate("world", 2, 0.85)) == [("world", 1, 0.9)]
    assert rows_of(exact, near, candidate("world", 2, 0.9)) == [("world", 2, 0.9)]
    # Another placement without lossy wires is as good.
    other = candidate("node", 0, 0.95)
    assert rows_of(exact, far, other) == [("node", 0, 0.95), ("world", 0, 1.0)]


@settings(max_examples=50, deadline=None)
@given(st.lists(st.floats(0.5, 2), min_size=8, max_size=8))
def test_what_is_chosen_is_never_far_from_the_fastest(seconds: list[float]) -> None:
    candidates = [
        candidate(weights, lossy, seconds[4 * i + lossy])
        for i, weights in enumerate(("node", "world")) for lossy in range(4)
    ]  # fmt: skip
    best, *others = rows_of(*candidates)
    assert best[2] <= 1.1**4 * min(seconds)
    assert len(others) == 1
    assert best[1] == 0 or best[2] * 1.1 < min(seconds[0], seconds[4])


def test_of_equally_fast_ones_the_first_surely_fits() -> None:
    """Within the error of the fastest; of placements, and of candidates of one."""
    room = MACHINE.device.memory_gib * GIB
    tight, safe = (replace(candidate("world", 0, 1.0), peak=peak) for peak in (0.95 * room, 0.5 * room))

    def first(*candidates: Candidate) -> float:
        ranked = sorted(candidates, key=lambda one: one.step_time_s)
        return chosen(Plan(ranked, {one.knobs: one for one in ranked}), error=0.1)[0].step_time_s

    assert first(tight, replace(safe, step_time_s=1.09)) == 1.09
    assert first(tight, replace(safe, step_time_s=1.11)) == 1.0
    assert first(tight, replace(safe, step_time_s=1.09, knobs=("node", *safe.knobs[1:]))) == 1.09
    assert first(replace(tight, peak=0.9 * room), replace(safe, step_time_s=1.01)) == 1.0
    assert 0.9 < 1 / MEMORY_ERROR < 0.95


def test_the_search_finds_what_is_chosen_of_all() -> None:
    """In the order of what computation alone takes it predicts a part of the candidates."""
    machine, stack = setting(CONFIG, "dgx-a100-40gb", None)
    model = CONFIG.model("gpt-10b")
    of = machine, stack, model, 16, 2048, 64, axes_to_try(machine, model, [1, 2], [1, 2, 5]), [1, 2]
    some, every = (plan(*of, within=within) for within in (MODEL_ERROR, np.inf))
    assert len(some.candidates) < len(every.candidates) == some.tried
    assert [one.knobs for one in chosen(some)] == [one.knobs for one in chosen(every)]
    best = chosen(some)[0]
    assert some.reasons(best) == every.reasons(best)


def test_the_models_error_is_that_of_held_out_rows() -> None:
    accuracy = read_table(REFERENCE / "predicted" / "accuracy.csv")
    fitted = (accuracy["fitted_constants"] > 0) & ~accuracy["source"].isin(MEMORY)
    held_out = accuracy[(accuracy["use"] == "held out") & fitted]
    assert held_out["mean_error_percent"].max() <= 100 * MODEL_ERROR + 0.05


def test_one_node_needs_no_lossy_wires() -> None:
    """Links inside a node are fast: int8 gains 0.05 % there, which is nothing."""
    found = plan(MACHINE, STACK, CONFIG.model("llama-7b"), 8, 2048, 32, [ONLY_DATA], [1], ["full"])
    rows = chosen(found)
    assert [lossy_wires(row) for row in rows] == [0] * len(rows)
    placements = [row.knobs[: len(STATES)] for row in rows]
    assert len(set(placements)) == len(placements) > 1
    exact = plan(
        MACHINE, STACK, CONFIG.model("llama-7b"), 8, 2048, 32, [ONLY_DATA], [1], ["full"], exact=True
    )
    assert chosen(exact)[0].step_time_s == rows[0].step_time_s
    assert {lossy_wires(one) for one in exact.ranked} == {0}


def test_plan_as_json_and_csv(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    job = [
        "plan",
        "--cluster",
        "dgx-a100-40gb",
        "--model",
        "llama-7b",
        "--gpus",
        "8",
        "--tp",
        "1",
        "--pp",
        "1",
    ]
    rows = json.loads(printed_by(capsys, *job, "--micro-batch", "1", "--json"))
    assert [row["rank"] for row in rows] == list(range(1, len(rows) + 1))
    first, *seconds = (row["step_time_s"] for row in rows)
    assert seconds == sorted(seconds)
    assert first <= (1 + MODEL_ERROR) * min(first, *seconds)  # it surely fits
    lines = list(csv.DictReader(io.StringIO(printed_by(capsys, *job, "--micro-batch", "1", "--csv"))))
    assert [float(line["step_time_s"]) for line in lines] == [row["step_time_s"] for row in rows]
    assert {line["provenance"] for line in lines} == {"predicted"}


def machine_file(folder: Path, *names: str) -> str:
    levels = [
        {"name": name, "size": 2 ** (i + 1), "link": {"gigabytes_per_s": 100, "source": "made up"}}
        for i, name in enumerate(names)
    ]
    world = {"name": "world", "link": {"gigabytes_per_s": 10, "source": "made up"}}
    device = {"name": "d", "memory_gib": 80, "peak_tflops": {"bf16": 300}, "source": "made up"}
    file = folder / f"{'-'.join(names) or 'flat'}.yaml"
    file.write_text(yaml.safe_dump({"description": "d", "device": device, "levels": [*levels, world]}))
    return str(file)


@pytest.mark.parametrize(
    ("inner", "package", "node"),
    [
        (("package", "node"), "package", "node"),
        (("pair", "board"), "pair", "board"),
        (("pair", "node"), "pair", "node"),
        (("package", "host"), "package", "host"),
        (("pair", "node", "rack"), "pair", "node"),
        (("a", "b", "c"), "b", "c"),
    ],
)
def test_levels_are_matched_by_position(inner: tuple[str, ...], package: str, node: str) -> None:
    placed = CONFIG.scheme("hier3").on(inner)
    assert (placed.weights, placed.grads, placed.optim) == (package, node, "world")
    assert CONFIG.scheme("zeropp").on(inner).secondary == node
    assert CONFIG.scheme("zero3").on(inner) == CONFIG.scheme("zero3")


@pytest.mark.parametrize("inner", [("node",), ("host",), ()])
def test_a_level_that_is_nowhere_is_refused_with_the_mend(inner: tuple[str, ...]) -> None:
    with pytest.raises(UserError, match="no level 'package', and none in its place") as error:
        CONFIG.scheme("hier3").on(inner)
    assert "a machine with that level" in error.value.allowed


def test_several_schemes_are_one_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    job = ["predict", "--model", "llama-7b", "--gpus", "8", "--root", str(ROOT)]
    cluster = ["--cluster", machine_file(tmp_path, "pair", "board")]
    known, *lines = printed_by(capsys, *job, *cluster, "--scheme", "zero3", "zeropp", "hier3").splitlines()
    assert known.startswith("lower bound, no evidence on this machine")
    assert lines[0].startswith("predicted on pair-board, stack ours, 80 GiB a rank")
    assert [line.split()[1] for line in lines[2:6]] == ["scheme", "zero3", "zeropp", "hier3"]
    assert sum("matmul_efficiency" in line for line in lines) == 1


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (["--cluster", "FILE"], "a suite cannot name the file"),
        (["--model", "llama-7b"], "can be predicted, not trained"),
        (["--write", "hier3"], "'hier3' is taken"),
        (["--seq", "999999"], "longer than the longest"),
    ],
)
def test_what_cannot_be_written_is_refused_before(
    changes: list[str], words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given_ = [machine_file(tmp_path, "node") if word == "FILE" else word for word in changes]
    root = tmp_path / "root"
    root.mkdir()
    job = ["plan", "--cluster", "frontier", "--model", "gpt-1m", "--gpus", "8", "--tp", "1", "--pp", "1"]
    limits = ["--micro-batch", "1", "--recompute", "full", "--global-batch", "8", "--root", str(root)]
    assert words in printed_by(capsys, *job, *limits, "--write", "found", *given_, code=2)
    assert not list(root.iterdir())


def test_a_model_file_is_written_beside_and_read_back(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = tmp_path / "tiny.yaml"
    model.write_text("{layers: 2, hidden: 64, heads: 4, vocab: 256, seq_len: 64, source: ours}\n")
    job = ["plan", "--cluster", "frontier", "--model", str(model), "--gpus", "8", "--tp", "1", "--pp", "1"]
    root = tmp_path / "root"
    root.mkdir()
    assert main([*job, "--micro-batch", "1", "--write", "found", "--json", "--root", str(root)]) == 0
    told = capsys.readouterr()
    assert json.loads(told.out)
    assert set(told.err.splitlines()) == {f"written: {path}" for path in root.rglob("*.yaml")}
    [run] = Config(root).runs(["found"])
    assert (run.model.name, run.model.hidden, run.scheme.name) == ("tiny", 64, "found")
    written = sorted(str(path.relative_to(root)) for path in root.rglob("*.yaml"))
    assert written == ["config/models/tiny.yaml", "config/schemes/found.yaml", "config/suites/found.yaml"]
    assert {"tiny", "gpt-20b"} <= set(Config(root).models)
    # An entry of the same name in the file of all schemes is refused, not preferred silently.
    (root / "config" / "schemes.yaml").write_text("found: {weights: self, grads: self, optim: self}\n")
    with pytest.raises(UserError, match="also an entry"):
        Config(root).scheme("found")


def test_the_micro_batches_of_any_batch_are_found() -> None:
    for batch in (1, 2, 12, 97, 360, 2**20):
        assert divisors(batch) == [d for d in range(1, batch + 1) if batch % d == 0]
    assert len(divisors(10**12)) == 13 * 13


def test_the_search_counts_beyond_64_bits() -> None:
    """2^20 sequences of a model of a trillion parameters, as `predict` counts them."""
    machine, stack = setting(CONFIG, "frontier", None)
    model, scheme = CONFIG.model("gpt-1t"), CONFIG.scheme("zero3").on(list(machine.sizes))
    one = Workload(machine, stack, model, scheme, 64, 2**20, 2048, 1, recompute="full")
    several = replace(one, micro_batch=np.array([2**20], dtype=float), accumulation=np.array([1.0]))
    assert step_time(several).total == pytest.approx(step_time(one).total, rel=1e-12)
    tried = list(jobs(machine, stack, model, 64, 2048, 64 * 2**20, [ONLY_DATA], [2**20], ["full"]))
    assert {job.micro_batch.dtype for job in tried} == {np.dtype(float)}
