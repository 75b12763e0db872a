"""A wheel in an environment of its own: what is built in, what needs no torch, the README's six lines."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from zipfile import ZipFile

import pytest
from packaging.metadata import Metadata

import lowband
from tests import environments
from tests.checkout import ROOT

EXAMPLE = """
import torch
from torch import nn
from lowband.run.on_ranks import on_ranks

class Block(nn.Linear):
    def forward(self, x):
        return torch.tanh(super().forward(x))

class Model(nn.Sequential):
    def forward(self, x):
        return super().forward(x).square().mean()

def work():
    torch.manual_seed(1)
    module, x = Model(Block(6, 6), Block(6, 3)), torch.ones(2, 6)
    {lines}
    state = {last}
    return lowband.__file__, list(state)

print(on_ranks(4, work))
"""


class Installed:
    """A virtual environment with the wheel and what the wheel requires, in a folder of its own."""

    def __init__(self, folder: Path) -> None:
        tree, self.folder = folder / "tree", folder / "empty"
        for part in ("pyproject.toml", "README.md", "LICENSE"):
            tree.mkdir(exist_ok=True)
            shutil.copy2(ROOT / part, tree)
        for part in ("src", "config", "slurm"):
            ignored = shutil.ignore_patterns("__pycache__", "*.egg-info")
            shutil.copytree(ROOT / part, tree / part, symlinks=True, ignore=ignored)
        pip = [sys.executable, "-m", "pip", "-q", "--disable-pip-version-check"]
        built = ["--no-deps", "--no-build-isolation", "--wheel-dir", folder]
        subprocess.run([*pip, "wheel", *built, tree], check=True)
        shutil.rmtree(tree)
        [self.wheel] = folder.glob("*.whl")
        python = environments.made(folder / "venv")
        self.programs = python.parent
        at = ["--python", python]
        subprocess.run([*pip, *at, "install", "--no-deps", "--no-index", self.wheel], check=True)
        self.train = folder / "train"
        environments.link(environments.required("train"), self.train)
        self.folder.mkdir()

    def run(self, *command: str, path: str = "") -> subprocess.CompletedProcess[str]:
        """Run a program of the environment in an empty folder; `path` is PYTHONPATH."""
        variables = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        return subprocess.run(
            [self.programs / command[0], *command[1:]], cwd=self.folder, text=True, capture_output=True,
            env=variables | ({"PYTHONPATH": path} if path else {}), timeout=600,
        )  # fmt: skip


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Installed:
    return Installed(tmp_path_factory.mktemp("wheel"))


def test_predictions_need_neither_the_checkout_nor_torch(installed: Installed) -> None:
    job = ["--cluster", "frontier", "--model", "gpt-20b", "--scheme", "hier3", "zero3", "--gpus", "384"]
    done = installed.run("lowband", "predict", *job, "--csv")
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) == 3
    done = installed.run("lowband", "predict", *job[:2], *job[2:5], "none", *job[6:])
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "no entry 'none'" in done.stderr
    assert "hier3" in done.stderr


def test_what_needs_torch_names_the_extra(installed: Installed) -> None:
    hint = "needs torch: pip install 'lowband[train]'"
    for code in ("import lowband; lowband.shard", "from lowband import Checkpointer"):
        done = installed.run("python", "-c", code)
        assert done.returncode == 1
        assert done.stderr.splitlines()[-1].endswith(hint)
        assert "During handling" not in done.stderr
    done = installed.run("lowband", "bench-start", "--out", "start")
    assert (done.returncode, done.stderr) == (2, f"lowband: lowband bench-start {hint}\n")


def test_doctor(installed: Installed) -> None:
    done = installed.run("lowband", "doctor")
    assert done.returncode == 0, done.stderr
    assert re.search(r"^torch +missing .*lowband\[train\]", done.stdout, re.MULTILINE)
    assert re.search(r"^papermill +missing .*lowband\[report\]", done.stdout, re.MULTILINE)


def test_the_readme_s_six_lines(installed: Installed) -> None:
    [example] = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    first, *lines, last = example.strip().splitlines()
    program = installed.folder / "train.py"
    body = EXAMPLE.format(lines="\n    ".join(lines), last=last)
    program.write_text(f"{first}\n{body}")
    done = installed.run("python", "train.py", path=str(installed.train))
    assert done.returncode == 0, done.stderr
    assert str(installed.programs.parent) in done.stdout
    assert "['0.weight', '0.bias', '1.weight', '1.bias']" in done.stdout


def test_its_metadata_are_those_that_pypi_takes(installed: Installed) -> None:
    """By the rules of `packaging`; `make dist` has twine check it, with a renderer of the README."""
    with ZipFile(installed.wheel) as wheel:
        [name] = [name for name in wheel.namelist() if name.endswith(".dist-info/METADATA")]
        metadata = Metadata.from_email(wheel.read(name), validate=True)
    assert (metadata.name, str(metadata.version)) == ("lowband", lowband.__version__)
    assert metadata.license_expression == "Apache-2.0"
    assert metadata.description_content_type == "text/markdown"
    assert metadata.description == (ROOT / "README.md").read_text()
    done = installed.run("lowband", "--help")
    assert (done.returncode, done.stderr) == (0, "")
    assert "predict, train and measure:" in done.stdout


def test_what_is_in_the_wheel(installed: Installed) -> None:
    package = ROOT / "src" / "lowband"
    modules = {f"lowband/{file.relative_to(package)}" for file in package.rglob("*.py")}
    files = [ROOT / "config" / "models.yaml", ROOT / "config" / "schemes.yaml"]
    for pattern in ("config/stacks/*.yaml", "slurm/*/machine.yaml", "slurm/*/job.yaml"):
        files += ROOT.glob(pattern)
    built_in = {f"lowband/builtin/{file.relative_to(ROOT)}" for file in files}
    with ZipFile(installed.wheel) as wheel:
        names = {name for name in wheel.namelist() if name.startswith("lowband/")}
    assert modules | built_in <= names
    assert {name for name in names if name.startswith("lowband/builtin/")} == built_in
