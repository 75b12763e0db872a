"""Items that are programs of their own: tests, the engine over the bare module, steps, whole runs.

Each is started in the tree with this Python, ends within the time that is left or is killed with all of its
processes, and leaves its files in the folder. What they print is in log.txt.
"""

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from lowband.bench.gpu.families import FAMILIES, ROOT
from lowband.bench.gpu.queue import Item
from lowband.spec.benchmarks import GPU_MODELS

LOG = "log.txt"
RUNS, SUITES = "one-gpu", ("one-gpu-host", "one-gpu")  # a family, and the suites whose runs it has
# Races between streams first, because all else rests on them; cases of kernels are compiled in parallel.
TESTS = {
    "engine": "engine or streams",
    "kernels": "adamw or block_quant or softmax",
    "attention": "flash_attention",
}
_PYTHON = (sys.executable, "-m")


def items(out: Path, device_type: str, families: list[str]) -> Iterator[Item]:
    """device_type: cpu leaves out what would take minutes there"""
    if "tests" in families:
        for name, chosen in TESTS.items():
            report = f"--junitxml={out / f'tests-{name}.xml'}"
            yield _item(
                f"tests {name}", "tests", out,
                [(*_PYTHON, "pytest", "-p", "no:cacheprovider", "tests/gpu", "-k", chosen, report)],
            )  # fmt: skip
    if "overhead" in families:
        run = (sys.executable, "tests/gpu/overhead.py", "--device", device_type)
        yield _item("overhead", "overhead", out, [(*run, "--out", str(out / "overhead.json"))])
    if device_type == "cpu":
        return
    if "steps" in families:
        yield _item(
            "steps", "steps", out, [(*_PYTHON, "lowband", "bench-compile", "--out", str(out / "compile"))]
        )
    if "mfu" in families:
        for model in GPU_MODELS:
            bench = (*_PYTHON, "lowband", "bench-mfu", "--model", model, "--out", str(out / "mfu" / model))
            yield _item(f"mfu {model}", "mfu", out, [bench])
    if RUNS in families:
        yield from _runs(out)


def _runs(out: Path) -> Iterator[Item]:
    """Each run of the suites, in its folder under runs/."""
    from lowband.spec.config import Config

    for suite in SUITES:
        write_specs = (*_PYTHON, "lowband", "spec", "--suite", suite, "--out", str(out / "runs"))
        for run in Config(ROOT).runs([suite]):
            train = (*_PYTHON, "lowband", "train", str(out / "runs" / run.run_id / "spec.json"), "--again")
            yield _item(run.run_id, RUNS, out, [write_specs, train])


def _item(name: str, family: str, out: Path, commands: list[tuple[str, ...]]) -> Item:
    value, seconds, _ = FAMILIES[family]
    return Item(name=name, family=family, value=value, seconds=seconds, run=run_all(commands, out / LOG))


def run_all(
    commands: list[tuple[str, ...]], log: Path
) -> Callable[[float], tuple[str, str, list[dict[str, Any]]]]:
    """A function of the seconds left: run the commands one after another, as an item's `run` does."""
    return partial(_run_all, commands, log)


def _run_all(
    commands: list[tuple[str, ...]], log: Path, left_s: float
) -> tuple[str, str, list[dict[str, Any]]]:
    path = [
        str(ROOT / "src"),
        *filter(None, [os.environ.get("PYTHONPATH")]),
    ]  # and wheels that were brought along
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path)}
    with log.open("a", encoding="utf-8") as file:
        for command in commands:
            file.write(f"== {' '.join(command[1:])}\n")
            file.flush()
            program = subprocess.Popen(
                command,
                cwd=ROOT,
                env=environment,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            try:
                code = program.wait(left_s)
            except subprocess.TimeoutExpired:
                return "not run", f"killed after the {left_s:.0f} s that were left", []
            finally:
                _end(program)
            if code:
                return "error", f"exit code {code}: see {log.name}", []
    return "ok", "", []


def _end(program: subprocess.Popen[bytes]) -> None:
    """Kill what is left of a program's processes: it leads a session of its own."""
    with suppress(ProcessLookupError):
        os.killpg(program.pid, signal.SIGKILL)
    program.wait()
