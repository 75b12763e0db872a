"""Each site's env.sh in a job: the script that `lowband spec --sbatch` writes, on two nodes of a box."""

import json
import shutil
from pathlib import Path

import pytest
from commands import MACHINE, SUITE, lowband

from tests.checkout import ROOT

pytestmark = [pytest.mark.usefixtures("with_slurm"), pytest.mark.waits]

JOB = "tasks: rank\ncpus_per_rank: 1\naccount: false\nsbatch: --exclusive\n"
MODULE = 'module() { echo module "$@" >> modules.txt; }\n'  # a box has none to load


@pytest.mark.wide
@pytest.mark.parametrize("site", ["cuda", "frontier", "lumi", "perlmutter"])
def test_a_sites_script_trains_on_two_nodes(site: str, tree: Path) -> None:
    box = tree / "slurm" / f"{site}-box2"
    box.mkdir()
    (box / "machine.yaml").write_text(MACHINE.replace("{name: package, size: 2,", "{name: node, size: 1,"))
    (box / "job.yaml").write_text(JOB)
    quiet = (ROOT / "slurm" / "frontier-box" / "env.sh").read_text()
    (box / "env.sh").write_text(MODULE + (ROOT / "slurm" / site / "env.sh").read_text() + quiet)
    suite = SUITE.replace("small-box", box.name).replace("repeats: 5", "repeats: 1")
    suite = suite.replace("steps: 12", "steps: 2")
    (tree / "config" / "suites" / "faults.yaml").write_text(suite)
    shutil.rmtree(tree / "slurm" / "small-box")

    written = lowband("spec", "--suite", "faults", "--sbatch", "--out", "runs", cwd=tree)
    [script] = written.stdout.split()
    done = lowband(
        "box", "run", "--cluster", box.name, "--", "sbatch", "--wait", script, cwd=tree, timeout=1200
    )
    [log] = (tree / script).parent.glob("*.log")
    assert done.returncode == 0, done.stdout + done.stderr + log.read_text()
    run = (tree / script).parent
    assert json.loads((run / "outcome.json").read_text())["status"] == "ok"
    env = json.loads((run / "env.json").read_text())
    assert (env["hosts"], env["links"]) == (["node1", "node2"], "shaped")
    loads = [
        line
        for line in (ROOT / "slurm" / site / "env.sh").read_text().splitlines()
        if line.startswith("module")
    ]
    called = (tree / "modules.txt").read_text().splitlines() if loads else []
    assert called == [line.partition(" #")[0].strip() for line in loads]
