"""Run folders -> raw tables: every run is a row, whatever became of it."""

import json
from pathlib import Path

import pandas as pd
import pytest
from report_runs import ok_outcome, smoke_specs, write_failure, write_run, write_softmax

from lowband.box.network import PLAIN, SHAPED
from lowband.errors import UserError
from lowband.evidence.tables.build import write_table
from lowband.evidence.tables.collect import _warmup, collect, means_of
from lowband.evidence.tables.entries import TABLES
from lowband.spec.csv_tables import read_table
from lowband.spec.records import Environment, Outcome, Sent
from lowband.spec.run_folder import RunFolder
from lowband.spec.scheme import Scheme
from tests.checkout import CONFIG


def test_a_run_is_a_row_with_times_after_the_warmup(tables: Path) -> None:
    runs = read_table(tables / "runs.csv")
    assert list(runs["run_id"]) == [spec.run_id for spec in smoke_specs()]
    assert (runs["status"] == "ok").all()
    assert set(runs["measured_steps"]) == {4}
    assert list(runs["step_time_s"]) == [{1: 1.0, 4: 0.5, 8: 0.4}[ranks] for ranks in runs["ranks"]]
    assert (runs["exposed_comm_time_s"] == runs["step_time_s"] / 4).all()
    assert len(read_table(tables / "steps.csv")) == 6 * len(runs)


def test_the_numbers_of_a_run_in_a_box(tmp_path: Path) -> None:
    """Times 1 to 4 s after warm-up steps of 50 and 60 s, whose share of real work does not count either."""
    spec = next(spec for spec in CONFIG.runs(["box"]) if spec.scheme.name == "zero3" and spec.ranks == 8)
    spec = spec.model_copy(update={"steps": 6, "warmup_steps": 2})
    run = RunFolder(write_run(tmp_path, spec, 1, 5))
    records = []
    for record, time_s in zip(run.read_steps(), (50, 60, 2, 1, 4, 3), strict=True):
        own = Sent(level="node", collective="grad_reduce", wire="fp32", bytes=100)
        values = {
            "step_time_s": time_s,
            "real_share": time_s / 100,
            "sent": (own, own),
            "loss": float(time_s),
        }
        records.append(record.model_copy(update=values))
    run.steps.unlink()
    for record in records:
        run.append_step(record)
    outside = [("control", 7), ("all_gather", 30), ("reduce", 12)]
    outcome = ok_outcome(spec).model_copy(
        update={
            "peak_memory_bytes_max": 9, "peak_memory_bytes_min": 8, "wall_s": 77.0,
            "outside": tuple(
                Sent(level="node", collective=name, wire="fp32", bytes=count) for name, count in outside
            ),
        }
    )  # fmt: skip
    run.outcome.write_text(outcome.to_json())
    collect([run.path], tmp_path)
    row = read_table(tmp_path / "runs.csv").iloc[0]
    assert row["measured_steps"] == 4
    # Quantiles lie between the sorted times: 0.2 x 3 and 0.8 x 3 steps from the first of the four.
    times = row[["step_time_s", "step_time_q20_s", "step_time_q80_s"]].tolist()
    assert times == pytest.approx([2.5, 1.6, 3.4])
    assert row["real_share"] == 0.04
    assert row["final_loss"] == 3
    assert row["ledger_bytes"] == 6 * 200
    assert row["outside_bytes"] == 42
    assert (row["peak_memory_bytes_max"], row["peak_memory_bytes_min"], row["wall_s"]) == (9, 8, 77)
    scale = 160_000
    assert row["scale"] == scale
    assert row["outer_link_bytes_per_s"] == 12.5e9 / scale
    peak = spec.machine.device.peak_tflops[spec.compute_dtype]
    assert row["peak_flop_per_s_per_rank"] == peak * 1e12 / scale
    steps = read_table(tmp_path / "steps.csv")
    assert list(steps["is_warmup"]) == [True, True, False, False, False, False]
    assert list(steps["step_time_s"]) == [50, 60, 2, 1, 4, 3]
    run.outcome.write_text(outcome.model_copy(update={"resumed_from": 3}).to_json())
    collect([run.path], tmp_path / "resumed")  # after the third step, which is as cold as the first
    steps = read_table(tmp_path / "resumed" / "steps.csv")
    assert list(steps["is_warmup"]) == [True, True, False, True, True, False]
    row = read_table(tmp_path / "resumed" / "runs.csv").iloc[0]
    assert (row["measured_steps"], row["step_time_s"]) == (2, 2.5)
    twice = outcome.model_copy(update={"resumed_from": 4, "begins": (0, 2, 4)})
    one = spec.model_copy(update={"warmup_steps": 1})
    assert _warmup(one, twice, 6) == [True, False, True, False, True, False]
    run.outcome.write_text(outcome.model_copy(update={"of": "another"}).to_json())
    with pytest.raises(UserError, match="is of a run under another spec"):
        collect([run.path], tmp_path / "never")
    run.outcome.write_text(outcome.model_copy(update={"states": ()}).to_json())
    collect([run.path], tmp_path / "no-step")  # of the last attempt, which went on from the last step
    assert read_table(tmp_path / "no-step" / "states.csv").empty
    short = spec.model_copy(update={"warmup_steps": 3})
    assert _warmup(short, outcome.model_copy(update={"resumed_from": 3}), 6) == [True] * 3 + [False] * 3
    seen = read_table(tmp_path / "outside.csv")
    assert list(zip(seen["collective"], seen["outside_bytes"], strict=True)) == outside


def test_what_a_run_did_not_count_is_empty(tables: Path) -> None:
    """A count of nothing is no measurement of 0 bytes."""
    runs = read_table(tables / "runs.csv")
    for column in ("peak_memory_bytes_max", "peak_memory_bytes_min", "ledger_bytes", "outside_bytes"):
        assert runs[column].isna().all(), column
    assert (runs["closed_form_outside_bytes"].notna() == ~runs["is_quantized"]).all()


def test_bytes_of_replicas_that_meet_seldom_have_no_closed_form_of_one_step(tmp_path: Path) -> None:
    spec = CONFIG.runs(["seldom-peers"])[-1]
    assert spec.scheme.sync is not None
    collect([write_run(tmp_path / "runs", spec, 1, loss=5)], tmp_path)
    assert read_table(tmp_path / "runs.csv")["closed_form_outside_bytes"].isna().all()


def test_failed_runs_are_rows_with_their_cause(tmp_path: Path) -> None:
    good, oom, nan, lost = smoke_specs()[2:6]
    assert good.ranks > 1  # one rank sends nothing
    folders = [
        write_run(tmp_path, good, 1, 5),
        write_failure(tmp_path, oom, Outcome(status="oom", cause="not enough memory", steps=3)),
        write_failure(tmp_path, nan, Outcome(status="nan", cause="loss is nan at step 2", steps=1)),
        write_failure(tmp_path, lost, None),
    ]
    collect(folders, tmp_path)
    runs = read_table(tmp_path / "runs.csv")
    assert list(runs["status"]) == ["ok", "oom", "nan", "error"]
    assert list(runs["cause"].fillna("")) == [
        "", "not enough memory", "loss is nan at step 2", "no outcome written",
    ]  # fmt: skip
    assert list(runs["step_time_s"].isna()) == [False, True, True, True]
    for name in ("steps", "bytes", "states"):
        assert set(read_table(tmp_path / f"{name}.csv")["run_id"]) == {good.run_id}


def test_tables_of_failed_runs_only(tmp_path: Path) -> None:
    collect([write_failure(tmp_path, spec, None) for spec in smoke_specs()], tmp_path)
    write_softmax(tmp_path, {})
    for name, table in TABLES.items():
        if not {
            "validation",
            "context_balance",
            "published_context",
            "published_experts",
            "offload_logs",
            "published_tiers",
            "compiled",
            "comm",
            "jobs",
        } & set(table.sources):  # of no run
            write_table(name, tmp_path)
    scaling = read_table(tmp_path / "scaling.csv")
    assert len(scaling) == 9
    assert (scaling["runs_ok"] == 0).all()
    assert scaling["efficiency"].isna().all()


def test_what_only_one_side_counts_stands_beside_a_zero(tmp_path: Path) -> None:
    spec = next(s for s in smoke_specs() if s.scheme.name == "zero3" and s.ranks == 8)
    folder = write_run(tmp_path, spec, 1, 5)
    sent = (Sent(level="node", collective="forward_gather", wire="bf16", bytes=11),)
    outcome = ok_outcome(spec).model_copy(update={"sent": sent})
    (folder / "outcome.json").write_text(outcome.to_json())
    collect([folder], tmp_path)
    df = read_table(tmp_path / "bytes.csv").set_index(["level", "collective", "wire"])
    assert df.loc[("node", "forward_gather", "bf16"), "counted_bytes"] == 11
    assert df.loc[("node", "forward_gather", "bf16"), "closed_form_bytes"] == 0
    assert df.loc[("node", "forward_gather", "native"), "counted_bytes"] == 0
    assert df.loc[("node", "forward_gather", "native"), "closed_form_bytes"] > 0
    assert (df["difference_bytes"] == (df["counted_bytes"] - df["closed_form_bytes"]).abs()).all()


def test_copies_to_another_memory_are_rows_of_it(tmp_path: Path) -> None:
    spec = next(s for s in smoke_specs() if s.scheme.name == "zero3" and s.ranks == 8)
    on_host = Scheme.model_validate({**spec.scheme.model_dump(), "optim": "world@host"})
    spec = spec.model_copy(update={"scheme": on_host})
    folder = write_run(tmp_path, spec, 1, 5)
    sent = (Sent(level="host", collective="stash", wire="native", bytes=11),)
    (folder / "outcome.json").write_text(ok_outcome(spec).model_copy(update={"sent": sent}).to_json())
    collect([folder], tmp_path)
    df = read_table(tmp_path / "bytes.csv").set_index(["level", "collective", "wire"]).sort_index()
    assert df.loc[("host", "stash", "native"), "counted_bytes"] == 11
    assert df.loc[("host", "fetch", "native"), "counted_bytes"] == 0
    assert (df.loc["host", "closed_form_bytes"] > 0).all()


def test_states_without_a_closed_form_have_none(tables: Path) -> None:
    states = read_table(tables / "states.csv")
    other = states[states["state"] == "other"]
    assert (other["held_bytes"] == 7).all()
    assert other["closed_form_bytes"].isna().all()
    others = states[states["state"] != "other"]
    assert (others["difference_bytes"] == 0).all()


def test_counts_on_fake_tensors_are_not_measured(tmp_path: Path) -> None:
    spec = smoke_specs()[2]
    assert spec.ranks > 1  # one rank sends nothing
    folder = write_run(tmp_path, spec, 1, 5)
    (folder / "steps.jsonl").unlink()
    (folder / "spec.json").write_text(json.dumps({**json.loads(spec.to_json()), "device": "fake"}))
    collect([folder], tmp_path)
    for name in ("runs", "bytes", "states"):
        assert set(read_table(tmp_path / f"{name}.csv")["provenance"]) == {"predicted"}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda lines: [*lines, lines[-1]], r"steps\.jsonl:7: is the record of step 6 .allowed: step 7"),
        (lambda lines: [*lines, *lines], r"steps\.jsonl:7: is the record of step 1 .allowed: step 7"),
        (lambda lines: [*lines[:2], *lines[3:]], r"steps\.jsonl:3: is the record of step 4"),
        (lambda lines: lines[1:], r"steps\.jsonl:1: is the record of step 2"),
        (lambda lines: lines[:-1], r"steps\.jsonl: has the records of 5 steps .allowed: 6, as the outcome"),
        (lambda lines: None, r"steps\.jsonl: cannot be read"),
    ],
)
def test_doubled_or_missing_steps_never_reach_a_table(tmp_path: Path, change, message: str) -> None:
    folder = write_run(tmp_path, smoke_specs()[0], 1, 5)
    steps = folder / "steps.jsonl"
    changed = change(steps.read_text().splitlines(keepends=True))
    steps.unlink()
    if changed is not None:
        steps.write_text("".join(changed))
    with pytest.raises(UserError, match=message):
        collect([folder], tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_repeats_of_different_texts_or_links_are_refused(tmp_path: Path) -> None:
    """As of one that was trained again behind a change of the file."""
    first = smoke_specs()[0]
    again = {"run_id": f"{first.run_id}-again", "repeat": first.repeat + 1, "seed": first.seed + 1}
    second = first.model_copy(update=again)
    folders = [write_run(tmp_path, spec, 1, 5) for spec in (first, second)]
    collect(folders, tmp_path)
    made = [(folder, Environment.read_json(folder.env)) for folder in map(RunFolder, folders)]
    for change, said in (
        ({"data": [{"sha256": "a"}, {"sha256": "b"}]}, f"is of another text: {first.text} has changed"),
        (
            {"links": [SHAPED, f"{PLAIN}: no root"]},
            f"has other devices or links than a repeat: gloo, {PLAIN}",
        ),
        ({"backend": ["nccl", "gloo"]}, "has other devices or links than a repeat: gloo, "),
    ):
        [(name, values)] = change.items()
        for (folder, read), value in zip(made, values, strict=True):
            folder.write_environment(read.model_copy(update={name: value}))
        with pytest.raises(
            UserError, match=f"{folders[1]}: {said}.* .allowed: as {folders[0]}; .* trained again"
        ):
            collect(folders, tmp_path / "never")
        assert not (tmp_path / "never" / "runs.csv").exists()


def test_a_folder_without_a_spec_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot be read"):
        collect([tmp_path], tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_numbers_come_back_as_written(tables: Path) -> None:
    loss = read_table(tables / "steps.csv")["loss"]
    assert set(loss) == {5 + ranks * 2.0**-20 for ranks in (1, 4, 8)}
    assert pd.api.types.is_bool_dtype(read_table(tables / "steps.csv")["is_warmup"])


def test_times_of_replicas_that_meet_seldom_are_of_whole_periods() -> None:
    with_exchange = [1.0, 1.0, 1.0, 9.0] * 3 + [1.0]
    assert means_of(with_exchange, 4) == [3.0] * 3
    assert means_of(with_exchange, 1) == with_exchange
    assert means_of([1.0, 3.0], 4) == [2.0] and means_of([], 4) == []
