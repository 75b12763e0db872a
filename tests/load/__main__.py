"""`python -m tests.load --out FOLDER`: time and memory of the commands that must bear many runs, by size.

Snakemake plans a suite of up to 2,000 runs, and does up to 200 of three steps; `lowband collect` reads up to
10,000 run folders of 1,000 steps (7.5 GB, beside 2.4 GB of tables, in TMPDIR); `lowband import-log` reads up
to a million metric lines. Each command is a process of its own. Rows that the folder has already are kept.
"""

import argparse
import json
import shutil
import sys
import tempfile
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.called import called
from tests.campaign_rows import Rows, write_environment
from tests.checkout import ROOT
from tests.load import made

COLUMNS = ("part", "size", "input_bytes", "cpu_s", "wall_s", "peak_bytes", "commit")
STEPS = 1000
SRC = ROOT / "src"
TIMED = Path(__file__).with_name("timed.py")


@dataclass(frozen=True)
class Job:
    """A command, the folder it runs in, and the bytes that it reads."""

    arguments: list[str]
    cwd: Path
    input_bytes: int


def plan(runs: int, folder: Path) -> Job:
    made.tree(folder / "tree", runs, steps=3)
    suite = ["--config", "suites=[load]", "results=load"]
    return Job(["snakemake", "-n", "--quiet", "-c2", "tables", *suite], folder / "tree", 0)


def run(runs: int, folder: Path) -> Job:
    made.tree(folder / "tree", runs, steps=3)
    suite = ["--config", "suites=[load]", "results=load"]
    return Job(["snakemake", "--quiet", "all", "-c2", "tables", *suite], folder / "tree", 0)


def collect(runs: int, folder: Path) -> Job:
    found = made.run_folders(made.tree(folder / "tree", runs, STEPS), folder / "runs")
    listed = folder / "runs.txt"
    listed.write_text("".join(f"{path}\n" for path in found))
    size = sum(file.stat().st_size for path in found for file in path.iterdir())
    return Job(["lowband", "collect", f"@{listed}", "--out", str(folder / "tables")], folder, size)


def import_log(lines: int, folder: Path) -> Job:
    log = made.log(folder / "train.log", lines)
    told = ["--format", "megatron-lm", "--model", "gpt-20b", "--seq-len", "2048", "--ranks", "8"]
    command = ["lowband", "import-log", str(log), *told, "--out", str(folder / "steps.csv")]
    return Job(command, SRC.parent, log.stat().st_size)


PARTS: dict[str, tuple[Callable[[int, Path], Job], tuple[int, ...]]] = {
    "plan": (plan, (120, 500, 2000)),
    "run": (run, (20, 200)),
    "collect": (collect, (100, 1000, 10_000)),
    "import-log": (import_log, (10_000, 100_000, 1_000_000)),
}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.load", description=__doc__.split("\n")[0])
    parser.add_argument("--parts", nargs="*", choices=list(PARTS), default=list(PARTS), help="these only")
    parser.add_argument("--out", type=Path, required=True, help="folder of load.csv, env.json")
    options = parser.parse_args()
    rows = Rows(options.out / "load.csv", COLUMNS, ("part", "size"))
    write_environment(options.out)
    for part in options.parts:
        make, sizes = PARTS[part]
        for size in sizes:
            if rows.has(part, size):
                continue
            with _folder() as folder:
                row = measured(part, size, make(size, folder))
            print(*rows.add(row).values(), sep=" | ", flush=True)
    return 0


def measured(part: str, size: int, job: Job) -> dict[str, object]:
    """Processor time, wall time and peak resident memory of the command and of what it starts."""
    command = [sys.executable, "-S", TIMED, sys.executable, "-m", *job.arguments]
    result = called(*command, cwd=job.cwd, timeout=None)
    if result.returncode:
        sys.exit(f"{' '.join(job.arguments)}: {result.stderr}")
    return {"part": part, "size": size, "input_bytes": job.input_bytes, **json.loads(result.stdout)}


@contextmanager
def _folder():
    folder = Path(tempfile.mkdtemp(prefix="load-"))
    try:
        yield folder
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    sys.exit(main())
