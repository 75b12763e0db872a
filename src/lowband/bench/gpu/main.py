"""One call: look, compile in parallel, measure while there is time, show it beside the last rows."""

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from lowband.bench.gpu import kernel_groups, programs, table
from lowband.bench.gpu.base import beside
from lowband.bench.gpu.folder import ENVIRONMENT, Folder
from lowband.bench.gpu.queue import Item, work
from lowband.bench.kernels.rows import clocks_of, environment
from lowband.errors import UserError
from lowband.spec.files import write_whole

COSTS = "costs.json"  # beside shipped rows: seconds of each item
MOST_MINUTES = 24 * 60
LAST_S = 5.0  # for what comes after the last item
WHEELS = {
    "pydantic": "pydantic, pydantic_core, annotated_types and typing_inspection", "yaml": "PyYAML",
}  # fmt: skip


def gpu(
    out: Path,
    earlier: Path | None,
    minutes: float,
    families: list[str],
    device_type: str,
    print_line: Callable[[str], None],
    now: Callable[[], float],
) -> bool:
    """Measure what `out` and `earlier` do not have yet, until the clock `now` reads that many minutes.

    Returns whether every item that ran ended well. Raises UserError, before anything is measured, if there is
    no such device, if a package or the commit is missing, and for rows of another device or commit.
    """
    device, found = _checked(minutes, device_type)
    folder = Folder.begin(out, found, earlier)
    reference = table.reference_of(str(found["device"]))
    items = [
        *kernel_groups.items(device, families), *programs.items(out.resolve(), device.type, families),
    ]  # fmt: skip
    end_s = 60 * minutes - LAST_S
    if device.type == "cuda":
        cases = kernel_groups.compile_all(device, families, lambda name, family: not folder.has(name, family))
        print_line(f"{now():6.1f} s  {cases} cases compiled")
    work(_with_costs(items, reference, folder), folder, end_s, now, print_line)
    if device.type == "cuda":  # the clocks of a device that was just under load
        found["clocks_after"] = clocks_of(device)
        write_whole(out / ENVIRONMENT, json.dumps(found, indent=2) + "\n")
    for line in table.lines(out, reference):
        print_line(line)
    outcomes = [folder.entries[item.name].outcome for item in items]
    print_line(", ".join(f"{outcomes.count(outcome)} {outcome}" for outcome in sorted(set(outcomes))))
    return "error" not in outcomes


def gpu_beside(
    tree: Path,
    out: Path,
    minutes: float,
    families: list[str],
    device_type: str,
    print_line: Callable[[str], None],
    now: Callable[[], float],
) -> None:
    """Measure our kernels and those of another copy of the tree in turns; raises as `gpu` does."""
    device, found = _checked(minutes, device_type)
    write_whole(out / ENVIRONMENT, json.dumps(found, indent=2) + "\n")
    beside(tree, out, device, families, 60 * minutes - LAST_S, now, print_line)


def _checked(minutes: float, device_type: str) -> tuple[torch.device, dict[str, Any]]:
    """The device, and what is recorded of it; everything that a call needs is there."""
    if not 0 < minutes <= MOST_MINUTES:
        raise UserError(f"{minutes:g}", where="--minutes", allowed=f"above 0, at most {MOST_MINUTES}")
    check_packages()
    device = _device(device_type)
    found = environment(device)
    if found["commit"] == "unknown":
        raise UserError("which commit this tree is of is unknown", where="LOWBAND_COMMIT", allowed="its name")
    return device, found


def check_packages() -> None:
    """Raise UserError for a package that is missing, with the wheels to bring along."""
    for package, wheels in WHEELS.items():
        try:
            __import__(package)
        except ImportError:
            raise UserError(
                f"{package} is missing", where="lowband gpu", allowed=f"wheels of {wheels}, for this Python"
            ) from None


def _device(device_type: str) -> torch.device:
    if device_type == "cpu":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise UserError("there is no CUDA or ROCm device", where="--device", allowed="cpu")
    device = torch.device(device_type, 0)
    torch.cuda.set_device(device)
    return device


def _with_costs(items: list[Item], reference: Path | None, folder: Folder) -> list[Item]:
    """The items with the seconds that they took in the folder, or when the shipped rows were made."""
    path = reference / COSTS if reference else None
    costs = json.loads(path.read_text(encoding="utf-8")) if path and path.exists() else {}
    costs |= {name: entry.seconds for name, entry in folder.entries.items() if entry.outcome == "ok"}
    return [
        dataclasses.replace(item, seconds=max(costs.get(item.name, item.seconds), 1e-3)) for item in items
    ]
