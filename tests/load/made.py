"""Inputs of any size: a suite, its run folders (by the project's own classes), and a foreign log."""

import random
import shutil
from pathlib import Path

from lowband.spec.config import Config
from lowband.spec.files import write_whole
from lowband.spec.records import Environment, StepRecord
from lowband.spec.run import RunSpec
from lowband.spec.run_folder import RunFolder
from tests.unit.report_runs import ok_outcome
from tests.workflow.trees import copy_tree

SCHEMES = ("ddp", "zero3", "hpz", "zeropp", "hier3")
RANKS = (1, 2, 4, 8)
POINTS = len(SCHEMES) * len(RANKS)

_SUITE = """
purpose: as many runs as are asked for
cluster: local
repeats: {repeats}
fixed: {{model: gpt-200k, global_batch: 8, seq_len: 32, steps: {steps}, warmup_steps: 2}}
axes:
  scheme: [{schemes}]
  ranks: [{ranks}]
"""


def tree(to: Path, runs: int, steps: int) -> Path:
    """A copy of the tree with the suite `load` of so many runs. runs: a multiple of POINTS"""
    assert runs % POINTS == 0
    if not to.exists():
        to.mkdir(parents=True)
        copy_tree(to)
    text = _SUITE.format(
        repeats=runs // POINTS, steps=steps, schemes=", ".join(SCHEMES), ranks=", ".join(map(str, RANKS))
    )
    (to / "config" / "suites" / "load.yaml").write_text(text)
    return to


def run_folders(root: Path, to: Path) -> list[Path]:
    """A folder with all records for each run of the suite. Repeats of a point have the same records.

    root: what `tree` returned
    """
    of_points: dict[tuple[str, int], RunFolder] = {}
    folders = []
    for spec in Config(root).runs(["load"]):
        folder = RunFolder(to / spec.run_id)
        write_whole(folder.spec, spec.to_json())
        key = spec.scheme.name, spec.ranks
        if key not in of_points:
            _write_records(folder, spec)
            of_points[key] = folder
        else:
            for path in ("env", "steps", "outcome"):
                shutil.copyfile(getattr(of_points[key], path), getattr(folder, path))
        folders.append(folder.path)
    return folders


def _write_records(folder: RunFolder, spec: RunSpec) -> None:
    outcome = ok_outcome(spec)
    rng = random.Random(folder.path.name)
    environment = Environment(
        commit="c0ffee", dirty=False, hosts=("here",), device="made up", versions={}, variables={}, data={},
    )  # fmt: skip
    folder.write_environment(environment)
    for step in range(1, spec.steps + 1):
        time, exposed = rng.uniform(1, 2), rng.uniform(0, 0.1)
        record = StepRecord(
            step=step, step_time_s=time, compute_time_s=time - exposed, exposed_comm_time_s=exposed,
            hidden_comm_time_s=rng.uniform(0, 0.5), tokens=spec.tokens_per_step, loss=rng.uniform(2, 5),
            grad_norm=rng.uniform(0, 1), sent=outcome.sent,
        )  # fmt: skip
        folder.append_step(record)
    folder.write_outcome(outcome)


def log(to: Path, lines: int) -> Path:
    """A log of Megatron-LM, each line a step's."""
    rng = random.Random(lines)
    with to.open("w", encoding="utf-8") as file:
        for step in range(1, lines + 1):
            file.write(
                f" [2026-11-20 10:00:00] iteration {step:8d}/ {lines:8d} | consumed samples: {16 * step:12d} "
                f"| elapsed time per iteration (ms): {rng.uniform(1900, 2100):.1f} | throughput per GPU "
                f"(TFLOP/s/GPU): {rng.uniform(100, 300):.1f} | learning rate: 3.000000E-06 | global batch "
                f"size:    16 | lm loss: {rng.uniform(2, 5):.6E} | loss scale: 1.0 | grad norm: "
                f"{rng.uniform(0, 9):.3f} | number of skipped iterations:   0 | number of nan iterations: 0 "
                "|\n"
            )
    return to
