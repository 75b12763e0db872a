"""`lowband` as a user runs it, and the tree of a small box in which tests run it."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]  # faults_job.py, a script in a box, imports this: no package `tests` there

PARTS = (
    "Snakefile", "workflow", "config", "envs", "slurm", "src", "examples", "results/reported",
    "results/reference",
)  # fmt: skip

# Four nodes of two ranks; a step takes some seconds: long enough for all faults.
MACHINE = """
like: frontier
description: four small nodes
box: {scale: 1000000, nodes: 4, tflops: 76.6, source: test}
levels:
  - {name: package, size: 2, link: {gigabytes_per_s: 200, source: test}}
  - {name: world, link: {gigabytes_per_s: 50, source: test}}
"""
SUITE = """
purpose: jobs that end badly
cluster: small-box
repeats: 5
fixed:
  {model: gpt-200k, scheme: zero3, ranks: 2, micro_batch: 2, seq_len: 32, steps: 12, warmup_steps: 1,
  checkpoint_every: 2, time_limit_s: 600}
"""


# Inside the box: what the suite asks for, through Slurm.
SNAKEMAKE = [
    sys.executable, "-m", "snakemake", "--profile", "slurm", "--config", "suites=['faults']",
    "results=faults", "--",
]  # fmt: skip
WORKFLOW = [*SNAKEMAKE, "results/faults/tables/runs.csv"]


def lowband(*arguments: str, timeout: float = 600, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    """`python -m lowband ...`, from the root of a tree."""
    env = {**os.environ, "PYTHONPATH": str(cwd / "src")}
    command = [sys.executable, "-m", "lowband", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout, cwd=cwd, env=env)


def in_small_box(tree: Path, *command: str, timeout: float = 1200) -> subprocess.CompletedProcess[str]:
    """A command that ends well in the tree's small box."""
    done = lowband("box", "run", "--cluster", "small-box", "--", *command, cwd=tree, timeout=timeout)
    assert done.returncode == 0, done.stdout + done.stderr
    return done


def copy_tree(to: Path) -> Path:
    """The parts of the project that a workflow needs, with a small box and a suite for it."""
    for part in PARTS:
        source = ROOT / part
        (to / part).parent.mkdir(parents=True, exist_ok=True)
        (shutil.copytree if source.is_dir() else shutil.copy2)(source, to / part)
    box = to / "slurm" / "small-box"
    box.mkdir()
    (box / "machine.yaml").write_text(MACHINE)
    shutil.copy2(ROOT / "slurm" / "frontier-box" / "env.sh", box)
    (to / "config" / "suites" / "faults.yaml").write_text(SUITE)
    return to
