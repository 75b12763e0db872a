"""The commands of docs/first-hour.md, read out of it, and run in a copy of the tree as far as CPUs go."""

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from test_examples import run

from tests.checkout import ROOT

PAGE = (ROOT / "docs" / "first-hour.md").read_text()
INSTALL = "make install && . .venv/bin/activate"  # made what the tests run in
SBATCH = '#!/bin/sh\nfor script; do :; done\nbash -n "$script" && echo "$@" && echo Submitted batch job 1\n'
MOST_LINES = 10
SHIPPED = "results/reference/local"  # with which a suite's own claims are compared


def told(heading: str) -> list[str]:
    """The commands of a path, without their comments."""
    [block] = re.findall(rf"^## {heading}\n.*?^```\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    lines = block.splitlines()
    assert 0 < len(lines) <= MOST_LINES
    return [line.partition("  #")[0].strip() for line in lines]


class Reader:
    """Who types the commands, in a copy of the tree. `sbatch` only reads the script."""

    def __init__(self, folder: Path) -> None:
        self.tree, commands = folder / "tree", folder / "commands"
        ignored = shutil.ignore_patterns("*.egg-info", "reference")
        parts = "Snakefile", "config", "envs", "slurm", "src", "workflow", "results/reported", SHIPPED
        for part in parts:
            (self.tree / part).parent.mkdir(parents=True, exist_ok=True)
            copied = shutil.copytree if (ROOT / part).is_dir() else shutil.copy2
            copied(
                ROOT / part, self.tree / part, **({"ignore": ignored} if copied is shutil.copytree else {})
            )
        commands.mkdir()
        (commands / "sbatch").write_text(SBATCH)
        (commands / "sbatch").chmod(0o755)
        programs = Path(sys.executable).parent
        self.variables = os.environ | {
            "PATH": f"{commands}:{programs}:{os.environ['PATH']}", "PYTHONPATH": str(self.tree / "src"),
        }  # fmt: skip

    def types(self, line: str, code: int = 0) -> str:
        if line.startswith("export "):
            name, _, value = line.removeprefix("export ").partition("=")
            self.variables |= {name: value}
            return ""
        done = subprocess.run(
            ["bash", "-c", line],
            cwd=self.tree,
            env=self.variables,
            capture_output=True,
            text=True,
            timeout=600,
        )
        assert done.returncode == code, line + "\n" + done.stdout + done.stderr
        return done.stdout


@pytest.fixture
def reader(tmp_path: Path) -> Reader:
    return Reader(tmp_path)


@pytest.mark.wide  # the same example as test_examples'
def test_two_gpus(reader: Reader) -> None:
    install, doctor, first, second, advise = told("With two GPUs")
    assert install == INSTALL
    assert "torch " in reader.types(doctor)
    losses = []
    for line in (first, second):  # forked, for torch takes seconds to import
        torchrun, option, ranks, example, *arguments = shlex.split(line)
        assert (torchrun, option) == ("torchrun", "--nproc-per-node")
        at = arguments.index("--checkpoints") + 1
        arguments[at] = str(reader.tree / arguments[at])
        losses.append(run(int(ranks), Path(example).name, *arguments))
    assert [len(each) for each in losses] == [2, 2]  # the second begins behind the first's 10 steps
    assert losses[1][-1] < losses[0][-1] < losses[0][0]
    assert "will it fit?  yes" in reader.types(advise)


def laptop(reader: Reader) -> tuple[str, str]:
    """All but the last two lines, which take minutes and are returned."""
    install, doctor, predict, spec, train, status, curves, *whole_suite = told("With a laptop")
    assert install == INSTALL
    assert "ranks train on the CPU" in reader.types(doctor)
    assert [row.split()[1] for row in reader.types(predict).splitlines()[3:5]] == ["hier3", "zero3"]
    assert len(reader.types(spec).splitlines()) == 9
    assert reader.types(train).rstrip().endswith(": ok, 6 steps")
    assert "9 runs: 1 ok, 8 waiting" in reader.types(status)
    reader.types(curves)
    [events] = {file.parent for file in (reader.tree / "build" / "curves").rglob("events.*")}
    found = EventAccumulator(str(events))
    found.Reload()
    assert all(len(found.Scalars(tag)) == 6 for tag in found.Tags()["scalars"])
    return whole_suite[0], whole_suite[1]


def test_a_laptop(reader: Reader) -> None:
    snakemake, summary = laptop(reader)
    assert "--figures" not in summary  # for the suite's tables alone are made
    assert "train" in reader.types(snakemake.replace("snakemake ", "snakemake -n --quiet rules ", 1))


@pytest.mark.wide
def test_a_laptop_and_a_whole_suite(reader: Reader) -> None:
    snakemake, summary = laptop(reader)
    reader.types(snakemake)
    assert "9 runs: 9 ok" in reader.types(summary)


def test_an_allocation(reader: Reader) -> None:
    export, doctor, rehearse, spec, sbatch, status = told("With an allocation")
    reader.types(export)
    assert "missing" in reader.types(doctor, code=1)
    assert "fits" in reader.types(rehearse)
    [script] = reader.types(spec).splitlines()
    assert "#SBATCH --account=abc123" in (reader.tree / script).read_text()
    assert reader.types(sbatch) == f"--qos=debug {script}\nSubmitted batch job 1\n"
    assert reader.types(status).startswith("1 runs: 1 waiting")
