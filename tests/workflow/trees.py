"""A copy of the tree to run the workflow in, so that nothing is written here."""

import shutil
import subprocess
import sys
from pathlib import Path

from tests.called import called
from tests.checkout import ROOT

PARTS = ("Snakefile", "workflow", "config", "envs", "slurm", "src", "CITATION.cff", "LICENSE")
# What commands without torch import most of their time.
PLAIN = (
    "snakemake.cli", "pandas", "matplotlib.backends.backend_pdf", "matplotlib.backends.backend_svg",
    "seaborn", "pydantic", "jinja2", "psutil", "papermill.cli",
)  # fmt: skip


def python() -> str:
    """What runs commands of the workflow; conftest.py has another."""
    return sys.executable


def copy_tree(to: Path) -> Path:
    """What `snakemake` needs, in the folder `to`."""
    for part in PARTS:
        source = ROOT / part
        if source.is_dir():
            # What Python has compiled too, without what is being written: each tree would compile it again.
            shutil.copytree(source, to / part, ignore=shutil.ignore_patterns("*.pyc.*"))
        else:
            shutil.copy2(source, to / part)
    for part in ("reported", "reference"):
        shutil.copytree(ROOT / "results" / part, to / "results" / part)
    return to


def snakemake(tree: Path, *arguments: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Run it in the tree."""
    command = [python(), "-m", "snakemake", "--cores", "2", *arguments]
    return called(*command, cwd=cwd or tree, tree=tree, timeout=None)


def planned(result: subprocess.CompletedProcess[str]) -> dict[str, int]:
    """Jobs by rule, of a dry run."""
    assert result.returncode == 0, result.stdout + result.stderr
    lines = iter((result.stdout + result.stderr).splitlines())
    if not any(line.startswith("Job stats:") for line in lines):
        return {}
    jobs = {}
    for line in list(lines)[2:]:
        if not line.strip():
            break
        name, count = line.split()
        jobs[name] = int(count)
    return jobs
