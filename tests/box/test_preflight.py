"""`lowband preflight` on four nodes through Slurm: nothing is wrong, then one fault of each kind."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from commands import SUITE, lowband

pytestmark = [pytest.mark.usefixtures("with_slurm"), pytest.mark.timed("times links that must not seem slow")]

HERE = Path(__file__).parent
# 2.7B parameters: predicted to need more than the memory that is left to the ranks of one node below.
BIG = (
    SUITE.replace("gpt-200k", "gpt-2.7b").replace("ranks: 2", "ranks: 8").replace("repeats: 5", "repeats: 1")
)
RUN = "runs/faults-gpt-2.7b-zero3-n0008-b2-s32-r1"
PREFLIGHT = f"{sys.executable} -m lowband preflight {RUN}/spec.json"


def in_box(tree: Path, script: str) -> subprocess.CompletedProcess[str]:
    (tree / "script.sh").write_text(script)
    return lowband("box", "run", "--cluster", "small-box", "--", "bash", "script.sh", cwd=tree, timeout=1200)


def findings(tree: Path, name: str) -> dict[str, list[dict[str, str]]]:
    """Findings of a preflight by check."""
    found: dict[str, list[dict[str, str]]] = {}
    for finding in json.loads((tree / name).read_text())["findings"]:
        found.setdefault(finding["check"], []).append(finding)
    return found


def test_faults_of_every_kind_are_named(tree: Path) -> None:
    (tree / "config" / "suites" / "faults.yaml").write_text(BIG)
    machine = tree / "slurm" / "small-box" / "machine.yaml"
    machine.write_text(machine.read_text().replace("scale: 1000000", "scale: 100000"))
    assert lowband("spec", "--suite", "faults", "--out", "runs", cwd=tree).returncode == 0
    shutil.copytree(tree / "src", tree / "older")
    (tree / "older" / "lowband" / "errors.py").open("a").write("# another commit\n")
    subprocess.run(
        ["gcc", "-shared", "-fPIC", "-o", str(tree / "ahead.so"), str(HERE / "ahead.c"), "-ldl"], check=True
    )
    shutil.copy(HERE / "faulty_node.sh", tree)
    slow = (
        "class change dev {end} parent 1: classid 1:20 htb rate 800kbit burst 3028 cburst 3028 quantum 1514"
    )
    script = f"""
      export MASTER_ADDR=10.77.1.10 TORCH_CPP_LOG_LEVEL=ERROR
      MASTER_PORT=29501 srun -N4 --ntasks-per-node=1 {PREFLIGHT}
      echo "code $?"
      mv {RUN}/preflight.json clean.json
      MASTER_PORT=29502 srun -N4 -n8 --distribution=cyclic {PREFLIGHT}
      echo "code $?"
      mv {RUN}/preflight.json cyclic.json
      tc -n lowband-fabric {slow.format(end="l1.2u")}
      tc -n lowband-fabric {slow.format(end="l1.2d")}
      MASTER_PORT=29503 srun -N4 --ntasks-per-node=1 bash faulty_node.sh $PWD/{RUN} {PREFLIGHT}
      echo "code $?"
      mv {RUN}/preflight.json faulty.json
    """
    done = in_box(tree, script)
    codes = [line for line in done.stdout.splitlines() if line.startswith("code")]
    assert codes == ["code 0", "code 1", "code 1"], done.stdout + done.stderr
    assert "nothing wrong was found" in done.stdout

    clean = findings(tree, "clean.json")
    assert {check: [one["verdict"] for one in found] for check, found in clean.items()} == {
        "placement": ["ok"],
        "versions": ["ok"],
        "device": ["ok"],
        "memory": ["ok"],
        "links of package": ["ok"],
        "links of world": ["ok"],
        "clocks": ["ok"],
        "file system": ["not checked"],  # the box's machine file states no rate of its own
    }

    cyclic = findings(tree, "cyclic.json")
    [placed] = cyclic["placement"]
    assert placed["verdict"] == "wrong"
    assert "not numbered host after host" in placed["found"]
    assert "--distribution=block" in placed["expected"]
    assert cyclic["links"][0]["verdict"] == "not checked"

    faulty = findings(tree, "faulty.json")
    named = {
        check: [one["found"] for one in found if one["verdict"] == "wrong"] for check, found in faulty.items()
    }
    assert not named["placement"] + named["device"] + named["links of package"]
    [versions] = named["versions"]
    assert "lowband's source" in versions and "on node2 (rank 2, 3)" in versions
    [memory] = named["memory"]
    assert "free on node3 (rank 4, 5)" in memory
    [links] = named["links of world"]
    assert links.endswith("slow: node3 (rank 4, 5)")
    [clocks] = named["clocks"]
    assert "node4 is +10 s" in clocks
    [files] = named["file system"]
    assert "does not see the file of rank" in files and files.endswith("all involve node2")
