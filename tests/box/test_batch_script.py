"""The batch script of examples/, submitted to Slurm in a box."""

import os
import re
import sys
from pathlib import Path

import pytest
from commands import lowband

pytestmark = [pytest.mark.usefixtures("with_slurm"), pytest.mark.waits]


def test_the_batch_script_trains_and_resumes(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    job = [
        "bash", "-c", 'source slurm/small-box/env.sh && exec "$@"', "bash",
        "sbatch", "--wait", "--nodes=2", "--ntasks-per-node=2", "--gpus-per-node=0", "--output=out.txt",
        "examples/train.sbatch", "--scheme", "zeropp", "--levels", "node=2", "--checkpoints", "saved",
    ]  # fmt: skip
    for steps in ("10", "20"):
        box = ["box", "run", "--cluster", "small-box", "--", *job, "--steps", steps]
        done = lowband(*box, cwd=tree, timeout=1200)
        out = (tree / "out.txt").read_text()
        assert done.returncode == 0, done.stdout + done.stderr + out
        trained = [int(step) for step in re.findall(r"step (\d+): loss", out)]
        assert trained == ([5, 10] if steps == "10" else [15, 20])
