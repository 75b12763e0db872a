"""Training curves of runs, as TensorBoard's own reader finds them; W&B's and MLflow's where installed."""

import json
import os
import struct
from pathlib import Path

import pytest
from report_runs import smoke_specs, write_failure, write_run
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from lowband.__main__ import main
from lowband.errors import UserError
from lowband.run.export_curves import export
from lowband.run.status import POLL_S
from lowband.spec.lock import hold
from lowband.spec.records import Outcome, Sent
from lowband.spec.run_folder import RunFolder, step_line
from tests.printed import printed_by


def curves_of(folder: Path) -> dict[str, list[tuple[int, float, float]]]:
    """Of a TensorBoard folder, by name: (step, value, seconds since 1970)."""
    reader = EventAccumulator(str(folder)).Reload()
    return {
        name: [(point.step, point.value, point.wall_time) for point in reader.Scalars(name)]
        for name in reader.Tags()["scalars"]
    }


@pytest.fixture
def results(tmp_path: Path) -> Path:
    """Two runs of 6 steps, the second of which has sent bytes and failed; one that has not begun."""
    runs = tmp_path / "results" / "runs"
    first, second, third = smoke_specs()[:3]
    ended = write_run(runs, first, 2, 5)
    os.utime(ended / "steps.jsonl", (10_000, 10_000))
    failed = RunFolder(write_run(runs, second, 1, 7))
    sent = [
        Sent(level="node", collective="forward_gather", wire="native", bytes=3),
        Sent(level="node", collective="grad_reduce", wire="int8", bytes=0.5),
        Sent(level="world", collective="grad_reduce", wire="int8", bytes=8),
    ]
    steps = [step.model_copy(update={"sent": tuple(sent)}) for step in failed.read_steps()]
    failed.steps.write_text("".join(map(step_line, steps)))
    failed.outcome.write_text(Outcome(status="oom", cause="no memory", steps=6).to_json())
    write_failure(runs, third, None)
    return tmp_path / "results"


def test_tensorboard_reads_them(results: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first, second, third = smoke_specs()[:3]
    out = tmp_path / "curves"
    assert main(["curves", str(results), "--to", "tensorboard", "--out", str(out)]) == 0
    assert capsys.readouterr().out == f"2 of 3 runs, 12 steps: {out}\n"
    curves = curves_of(out / first.run_id)
    assert [point[:2] for point in curves["loss"]] == [(step, 5.0) for step in range(1, 7)]
    assert [value for _, value, _ in curves["time_s/step"]] == [20, 20, 2, 2, 2, 2]
    assert [value for _, value, _ in curves["time_s/exposed_comm"]] == [5, 5, 0.5, 0.5, 0.5, 0.5]
    assert [at_s for *_, at_s in curves["loss"]] == [9972, 9992, 9994, 9996, 9998, 10_000]
    assert curves["tokens_per_s"][-1][1] == first.tokens_per_step / 2
    assert not any("sent" in name or "sync" in name for name in curves)  # null, or nothing
    curves = curves_of(out / second.run_id)
    assert [value for _, value, _ in curves["sent_bytes/node"]] == [3.5] * 6
    assert [value for _, value, _ in curves["sent_bytes/world"]] == [8] * 6
    assert not (out / third.run_id).exists()


def test_they_are_not_written_twice(
    results: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["curves", str(results), "--to", "tensorboard", "--out", str(tmp_path / "out")]
    assert main(command) == 0
    written = sorted((tmp_path / "out").rglob("*"))
    assert "exists already (allowed: a new folder as --out)" in printed_by(capsys, *command, code=2)
    assert sorted((tmp_path / "out").rglob("*")) == written


@pytest.mark.parametrize(("tool", "left"), [("wandb", "wandb"), ("mlflow", "mlflow.db")])
def test_nor_into_a_folder_that_has_some(results: Path, tmp_path: Path, tool: str, left: str) -> None:
    """MLflow and W&B take another run of the same name without a word."""
    (tmp_path / left).touch()
    with pytest.raises(UserError, match=rf"{left}: exists already \(allowed: a new folder as --out\)"):
        export(results, tool, tmp_path, False, print)


def test_a_folder_without_runs_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["curves", str(tmp_path), "--to", "tensorboard", "--out", str(tmp_path / "out")]) == 2
    assert "has no runs (allowed: results/<name>, or the folder of a run)" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_run_is_followed_to_its_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where it goes on from a checkpoint, and records steps again."""
    spec = smoke_specs()[0]
    folder = RunFolder(write_run(tmp_path, spec, 1, 5))
    whole, ending = folder.steps.read_text().splitlines(keepends=True), folder.outcome.read_text()
    folder.outcome.unlink()
    seen = iter([whole[:2], whole[:4], whole[:3], whole[:5], whole])
    folder.steps.write_text("")

    def later(seconds: float) -> None:
        assert seconds == POLL_S
        folder.steps.write_text("".join(steps := next(seen)))
        if steps is whole:
            folder.outcome.write_text(ending)

    monkeypatch.setattr("lowband.run.export_curves.time.sleep", later)
    with hold(folder.lock):
        export(folder.path, "tensorboard", tmp_path / "out", follow=True, say=print)
    points = curves_of(tmp_path / "out" / spec.run_id)["loss"]
    assert [step for step, *_ in points] == [1, 2, 3, 4, 5, 6]


def test_curves_that_are_followed_are_whole_when_that_is_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = smoke_specs()[0]
    folder = RunFolder(write_run(tmp_path, spec, 1, 5))
    folder.outcome.unlink()

    def ended(seconds: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("lowband.run.export_curves.time.sleep", ended)
    with hold(folder.lock), pytest.raises(KeyboardInterrupt):
        export(folder.path, "tensorboard", tmp_path / "out", follow=True, say=print)
    points = curves_of(tmp_path / "out" / spec.run_id)["loss"]
    assert [step for step, *_ in points] == [1, 2, 3, 4, 5, 6]


@pytest.mark.wide
def test_wandb_keeps_them_offline(results: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb", reason="needs pip install 'lowband[wandb]'")
    monkeypatch.delenv("WANDB_MODE", raising=False)
    out = tmp_path / "out"
    assert main(["curves", str(results), "--to", "wandb", "--out", str(out)]) == 0
    found = {}
    for path in (out / "wandb").glob("offline-run-*/*.wandb"):
        name, ending, history = wandb_run(path)
        found[name] = (ending, [(row["_step"], row["loss"], row.get("sent_bytes/node")) for row in history])
    first, second, _ = smoke_specs()[:3]
    assert found == {
        first.run_id: (0, [(step, 5, None) for step in range(1, 7)]),
        second.run_id: (1, [(step, 7, 3.5) for step in range(1, 7)]),
    }


def wandb_run(path: Path) -> tuple[str, int, list[dict[str, float]]]:
    """Name, exit code and history in a file of W&B: its messages in the log format of LevelDB."""
    from wandb.proto.wandb_internal_pb2 import Record

    data, at, block, message = path.read_bytes(), 7, 32768, b""
    name, ending, history = "", -1, []
    while at < len(data):
        if block - at % block < 7:  # no header fits
            at += block - at % block
            continue
        length, part = struct.unpack_from("<HB", data, at + 4)
        message += data[at + 7 : at + 7 + length]
        at += 7 + length
        if part not in (1, 4):  # neither whole nor the last part
            continue
        record, message = Record.FromString(message), b""
        if record.HasField("run"):
            name = record.run.display_name
        elif record.HasField("exit"):
            ending = record.exit.exit_code
        elif record.HasField("history"):
            items = record.history.item
            history.append({i.key or "/".join(i.nested_key): json.loads(i.value_json) for i in items})
    return name, ending, history


@pytest.mark.wide
def test_mlflow_keeps_them_in_a_file(results: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("mlflow", reason="needs pip install 'lowband[mlflow]'")
    from mlflow import MlflowClient

    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    out = tmp_path / "out"
    assert main(["curves", str(results), "--to", "mlflow", "--out", str(out)]) == 0
    client = MlflowClient(f"sqlite:///{out / 'mlflow.db'}")
    [experiment] = client.search_experiments(filter_string="name = 'lowband'")
    found = {}
    for run in client.search_runs([experiment.experiment_id]):
        points = client.get_metric_history(run.info.run_id, "loss")
        values = [(point.step, point.value) for point in points]
        found[run.info.run_name] = (run.info.status, values, run.data.params["scheme"])
    first, second, _ = smoke_specs()[:3]
    assert found == {
        first.run_id: ("FINISHED", [(step, 5) for step in range(1, 7)], first.scheme.name),
        second.run_id: ("FAILED", [(step, 7) for step in range(1, 7)], second.scheme.name),
    }
