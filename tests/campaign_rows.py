"""A campaign's files: its rows as CSV, kept from one call to the next; of which code, on which machine.

Nothing of lowband is imported until it is asked for: tests.mutants changes it.
"""

import csv
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

Row = dict[str, Any]


class Rows:
    """A campaign's rows, one for each key: those that its file has already are kept, so what was cut goes on.

    path: none if they are only printed
    key: columns; rows with a seed for their key stand in the order of the seeds, others as they were added
    """

    def __init__(self, path: Path | None, columns: Sequence[str], key: Sequence[str] = ("seed",)) -> None:
        self._path, self._columns, self._names = path, columns, tuple(key)
        self._rows = {self._key(row): row for row in (read(path) if path is not None else [])}

    def _key(self, row: Mapping[str, Any]) -> tuple[str, ...]:
        return tuple(str(row[name]) for name in self._names)

    def has(self, *key: object) -> bool:
        return tuple(map(str, key)) in self._rows

    def __iter__(self) -> Iterator[Row]:
        rows = self._rows.values()
        return iter(sorted(rows, key=lambda row: int(row["seed"])) if self._names == ("seed",) else rows)

    def add(self, row: Mapping[str, Any]) -> Row:
        """Write the file anew with this row, of today's commit."""
        added = {**row, "commit": commit()}
        self._rows[self._key(added)] = added
        if self._path is not None:
            write(self._path, self._columns, self)
        return added


def read(path: Path) -> list[Row]:
    """The rows as text; none if there is no such file."""
    if not path.exists():
        return []
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def write(path: Path, columns: Sequence[str], rows: Iterable[Mapping[str, Any]]) -> None:
    """The whole table or nothing: a campaign may be cut at any time."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_suffix(".unfinished")
    with unfinished.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, columns, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    unfinished.replace(path)


def write_environment(out: Path, links: str = "") -> None:
    """Make the campaign's folder, with its env.json."""
    import torch

    from lowband.run.environment import describe, host

    out.mkdir(parents=True, exist_ok=True)
    environment = describe((host(),), torch.device("cpu"), "gloo", {}, links)
    (out / "env.json").write_text(environment.to_json())


def commit() -> str:
    """The commit of the code, marked if files differ from it."""
    from lowband.run.environment import code_version

    found, is_dirty = code_version()
    return found + ("-dirty" if is_dirty else "")
