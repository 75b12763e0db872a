"""`lowband predict` says what validation says: each published run, put as a command line, is the same job."""

from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import yaml

from lowband.__main__ import command_line
from lowband.commands.predict import _grid
from lowband.evidence.validation import SOURCES, Rows, Setting, Source, reported
from lowband.predict.defaults import with_defaults
from lowband.predict.prediction import predict
from lowband.predict.workload import Workload
from tests.checkout import CONFIG, ROOT

EVERY = 97  # of vtrain's 1,440 rows; all of them with --wide
PARSER, _ = command_line()


def jobs(source: Source, every: int = 1) -> list[tuple[Rows, Any, list[Workload]]]:
    """Rows, what validation predicts of each, and its jobs."""
    setting = Setting(CONFIG, *with_defaults(*source.on(CONFIG)), reported(CONFIG, source.csv))
    rows: Rows = import_module(f"lowband.evidence.validation.{source.kind}").ROWS
    found = []
    for row in list(rows.where(setting).itertuples())[::every]:
        job = rows.job(setting, row)
        found.append((rows, job, list(job) if isinstance(job, tuple) else [job]))
    return found


def written(folder: Path, stem: str, entry: Any) -> Path:
    path = folder / f"{stem}.yaml"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(yaml.safe_dump(entry.model_dump(exclude_none=True, mode="json")))
    return path


def command(job: Workload, source: Source, folder: Path) -> list[str]:
    """What a user would type for the published run, where the stack does not say it."""
    stack = CONFIG.stack_on(source.stack, source.cluster)
    cluster, axes = source.cluster, job.axes
    if job.machine != with_defaults(CONFIG.machine(cluster), stack)[0]:  # fewer network cards
        cluster = str(written(folder, f"{cluster}/machine", job.machine))
    line = [
        "predict", "--root", str(ROOT), "--cluster", cluster, "--stack", source.stack,
        "--model", str(written(folder, job.model.name, job.model)), "--scheme", job.scheme.name,
        "--gpus", job.ranks, "--micro-batch", job.micro_batch, "--accumulation", job.accumulation,
        "--seq", job.seq_len, "--recompute", job.recompute, "--tp", axes.tensor, "--pp", axes.pipeline,
        "--interleave", axes.chunks, "--schedule", axes.schedule,
    ]  # fmt: skip
    if axes.tensor > 1 and axes.sequence_parallel != stack.sequence_parallel:
        line.append("--sequence-parallel" if axes.sequence_parallel else "--no-sequence-parallel")
    if axes.context > 1:
        line += ["--cp", axes.context, "--ways", axes.context_attention]
    if job.recomputed < 1:
        line += ["--recompute-layers", round(job.recomputed * job.model.layers)]
    for key in ("attention", "reduce_dtype", "products", "operations"):
        if getattr(job.stack, key) != getattr(stack, key):
            line += ["--" + key.replace("_", "-"), getattr(job.stack, key)]
    return [str(each) for each in line]


def check(name: str, every: int, folder: Path) -> None:
    source = SOURCES[name]
    for rows, theirs, of_row in jobs(source, every):
        told = []
        for job in of_row:
            grid = _grid(PARSER.parse_args(command(job, source, folder)))
            [asked] = grid.jobs()
            told.append(asked)
            for key in ("machine", "model", "scheme", "axes", "stack"):
                assert _plain(getattr(asked, key)) == _plain(getattr(job, key)), key
            [record] = grid.records()
            assert record["step_time_s"] == float(predict(job, interval=False).step_time_s)
        ours = tuple(told) if isinstance(theirs, tuple) else told[0]
        assert float(rows.of(ours)) == float(rows.of(theirs))


def _plain(part: Any) -> dict[str, Any]:
    return {k: v for k, v in part.model_dump(exclude_none=True).items() if k not in ("name", "source")}


@pytest.mark.parametrize("name", list(SOURCES))
def test_the_command_says_what_validation_says(name: str, tmp_path: Path) -> None:
    check(name, EVERY if name == "vtrain" else 1, tmp_path)


@pytest.mark.wide
def test_the_same_of_every_row_of_vtrain(tmp_path: Path) -> None:
    check("vtrain", 1, tmp_path)
