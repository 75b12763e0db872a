"""Our kernels beside those of another commit, in turns on one device: what a change gained.

Two calls minutes apart differ by some per cent for other reasons. So a second process has this tree's package
with the other's `kernels` folder in it, and both measure each group TURNS times, one after the other.
"""

import csv
import io
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from lowband.bench.gpu.families import ROOT
from lowband.bench.gpu.kernel_groups import compile_all, groups
from lowband.bench.kernels import PARTS
from lowband.bench.kernels.measure import KernelCase, measure
from lowband.errors import UserError
from lowband.spec.files import write_whole

TURNS = 3
TABLE = "base.csv"  # item, implementation, and the median seconds of each turn, ours and the base's
_PACKAGE = Path("src") / "lowband"


def beside(
    tree: Path,
    out: Path,
    device: torch.device,
    families: list[str],
    end_s: float,
    now: Callable[[], float],
    print_line: Callable[[str], None],
) -> None:
    """Write base.csv of our kernels and those of `tree`, another copy of it; nothing is begun after `end_s`.

    Raises UserError for a folder without our kernels, and if the other process ends.
    """
    if not (tree / _PACKAGE / "kernels").is_dir():
        raise UserError(
            f"no {_PACKAGE / 'kernels'}", where=tree, allowed="what `git archive COMMIT src` unpacks to"
        )
    if (out / TABLE).exists():
        raise UserError(f"has a {TABLE} already", where=out, allowed="a new folder")
    if device.type == "cuda":
        compile_all(device, families, lambda *_: True)
    rows: list[dict[str, object]] = []
    with _measuring(tree, device) as ask:
        for name, _, group in groups(device, families):
            ours = _of_us(group)
            if not ours or now() > end_s:
                continue
            turns = [(_seconds(ours, device), ask(name)) for _ in range(TURNS)]
            for implementation in turns[0][0]:
                row: dict[str, object] = {"item": name, "implementation": implementation}
                for turn, (mine, other) in enumerate(turns, 1):
                    row |= {
                        f"ours_{turn}_s": mine.get(implementation),
                        f"base_{turn}_s": other.get(implementation),
                    }
                rows.append(row)
                ratios = [
                    mine[implementation] / other[implementation]
                    for mine, other in turns if implementation in mine and implementation in other
                ]  # fmt: skip
                told = (
                    f"{statistics.median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f})"
                    if ratios
                    else "-"
                )
                print_line(f"{now():6.1f} s  {name} {implementation}: ours / base {told}")
            _write(rows, out / TABLE)


def _of_us(group: list[KernelCase]) -> list[KernelCase]:
    return [case for case in group if case.row.implementation.startswith(("triton", "flash2"))]


def _seconds(group: list[KernelCase], device: torch.device) -> dict[str, float]:
    """By implementation; without those that fail."""
    rows = measure(group, device, lambda: True)
    return {row.implementation: row.time_s for row in rows if row.time_s is not None}


@contextmanager
def _measuring(tree: Path, device: torch.device) -> Iterator[Callable[[str], dict[str, float]]]:
    """A function that measures a group, by its name, with the kernels of `tree` in a process of their own."""
    with tempfile.TemporaryDirectory() as folder:
        mixed = Path(folder) / _PACKAGE
        shutil.copytree(
            ROOT / _PACKAGE, mixed, ignore=lambda path, _: ["kernels"] if Path(path).name == "lowband" else []
        )
        shutil.copytree(tree / _PACKAGE / "kernels", mixed / "kernels")
        process = subprocess.Popen(
            [sys.executable, "-m", "lowband.bench.gpu.base", device.type], text=True, stdin=subprocess.PIPE,
            stdout=subprocess.PIPE, env={**os.environ, "PYTHONPATH": str(mixed.parent)},
        )  # fmt: skip

        def ask(name: str) -> dict[str, float]:
            assert process.stdin and process.stdout
            try:
                print(name, file=process.stdin, flush=True)
                answer = process.stdout.readline()
            except BrokenPipeError:
                answer = ""
            if not answer:
                raise UserError(f"the process with its kernels ended at {name}", where=tree)
            found: dict[str, float] = json.loads(answer)
            return found

        try:
            yield ask
        finally:
            process.kill()
            process.wait()


def _answer(device_type: str) -> None:
    """Measure each group named on standard input."""
    device = torch.device(device_type, 0) if device_type == "cuda" else torch.device(device_type)
    answers, sys.stdout = sys.stdout, sys.stderr  # what else prints is no answer
    by_name = {name: group for name, _, group in groups(device, list(PARTS))}
    for line in sys.stdin:
        print(json.dumps(_seconds(_of_us(by_name[line.strip()]), device)), file=answers, flush=True)


def _write(rows: list[dict[str, object]], path: Path) -> None:
    text = io.StringIO()
    writer = csv.DictWriter(text, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    write_whole(path, text.getvalue())


if __name__ == "__main__":
    _answer(sys.argv[1])
