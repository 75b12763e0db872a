"""Run folders -> raw tables: every run is a row, whatever became of it."""

import json
from pathlib import Path

import pandas as pd
import pytest
from report_runs import ok_outcome, smoke_specs, write_failure, write_run, write_softmax

from lowband.errors import UserError
from lowband.report.build_tables import TABLES, write_table
from lowband.report.collect import collect
from lowband.spec.csv_tables import read_table
from lowband.spec.records import Outcome, Sent


def test_a_run_is_a_row_with_times_after_the_warmup(tables: Path) -> None:
    runs = read_table(tables / "runs.csv")
    assert list(runs["run_id"]) == [spec.run_id for spec in smoke_specs()]
    assert (runs["status"] == "ok").all()
    assert set(runs["measured_steps"]) == {4}
    assert list(runs["step_time_s"]) == [{1: 1.0, 4: 0.5, 8: 0.4}[ranks] for ranks in runs["ranks"]]
    assert (runs["exposed_comm_time_s"] == runs["step_time_s"] / 4).all()
    assert len(read_table(tables / "steps.csv")) == 6 * len(runs)


def test_failed_runs_are_rows_with_their_cause(tmp_path: Path) -> None:
    good, oom, nan, lost = smoke_specs()[:4]
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
        assert set(read_table(tmp_path / f"{name}.csv")["run_id"]) <= {good.run_id}


def test_tables_of_failed_runs_only(tmp_path: Path) -> None:
    collect([write_failure(tmp_path, spec, None) for spec in smoke_specs()], tmp_path)
    write_softmax(tmp_path, {})
    for name, sources in TABLES.items():
        if not {"validation", "compiled", "comm", "jobs"} & set(sources):  # of no run
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


def test_states_without_a_closed_form_have_none(tables: Path) -> None:
    states = read_table(tables / "states.csv")
    other = states[states["state"] == "other"]
    assert (other["held_bytes"] == 7).all()
    assert other["closed_form_bytes"].isna().all()
    others = states[states["state"] != "other"]
    assert (others["difference_bytes"] == 0).all()


def test_counts_on_fake_tensors_are_not_measured(tmp_path: Path) -> None:
    spec = smoke_specs()[0]
    folder = write_run(tmp_path, spec, 1, 5)
    (folder / "steps.jsonl").unlink()
    (folder / "spec.json").write_text(json.dumps({**json.loads(spec.to_json()), "device": "fake"}))
    collect([folder], tmp_path)
    for name in ("runs", "bytes", "states"):
        assert set(read_table(tmp_path / f"{name}.csv")["provenance"]) <= {"predicted"}


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


def test_a_folder_without_a_spec_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot be read"):
        collect([tmp_path], tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_numbers_come_back_as_written(tables: Path) -> None:
    loss = read_table(tables / "steps.csv")["loss"]
    assert set(loss) == {5 + ranks * 2.0**-20 for ranks in (1, 4, 8)}
    assert pd.api.types.is_bool_dtype(read_table(tables / "steps.csv")["is_warmup"])
