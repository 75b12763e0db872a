"""The batch script of examples/, submitted to Slurm in a box."""

import os
import re
import sys
from pathlib import Path

import pytest
from commands import lowband

pytestmark = [pytest.mark.usefixtures("with_slurm"), pytest.mark.waits]

# Submitted twice, the second time for more steps; what each prints is kept.
TWICE = """
source slurm/small-box/env.sh
for steps in 10 20; do
  sbatch --wait --nodes=2 --gpus-per-node=0 --output=$steps.txt "$@" --steps $steps || exit
done
"""


@pytest.mark.parametrize(
    ("a_node", "words"),
    [
        (1, ["--scheme", "zero3"]),
        pytest.param(2, ["--scheme", "zeropp", "--levels", "node=2"], marks=pytest.mark.wide),
    ],
)
def test_the_batch_script_trains_and_resumes(
    a_node: int, words: list[str], tree: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every rank is an interpreter of its own, which is most of what this costs."""
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    job = [f"--ntasks-per-node={a_node}", "examples/train.sbatch", *words, "--checkpoints", "saved"]
    twice = ["bash", "-c", TWICE, "bash", *job]
    done = lowband("box", "run", "--cluster", "small-box", "--", *twice, cwd=tree, timeout=1200)
    out = {path.stem: path.read_text() for path in tree.glob("[12]0.txt")}
    assert done.returncode == 0, done.stdout + done.stderr + "\n".join(out.values())
    trained = {
        steps: [int(step) for step in re.findall(r"step (\d+): loss", text)] for steps, text in out.items()
    }
    assert trained == {"10": [5, 10], "20": [15, 20]}
