"""A campaign's files: its rows as CSV, kept from one call to the next; of which code, on which machine."""

import csv
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from lowband.run.environment import code_version, describe, host


def read(path: Path) -> list[dict[str, Any]]:
    """The rows as text; none if there is no such file."""
    if not path.exists():
        return []
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def write(path: Path, columns: Sequence[str], rows: Iterable[Mapping[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, columns, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def write_environment(out: Path, links: str = "") -> None:
    """Make the campaign's folder, with its env.json."""
    import torch

    out.mkdir(parents=True, exist_ok=True)
    environment = describe((host(),), torch.device("cpu"), "gloo", {}, links)
    (out / "env.json").write_text(environment.to_json())


def commit() -> str:
    """The commit of the code, marked if files differ from it."""
    found, is_dirty = code_version()
    return found + ("-dirty" if is_dirty else "")
