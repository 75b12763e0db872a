"""What a call leaves, and what the next one continues from: items.json, environment.json and kernels.csv.

items.json has an entry for each item, run or not: its family, its outcome (ok | error | not run), the reason,
how many seconds it took, the SHA-256 of the files that it measured, and its rows of kernels.csv. A folder is
of one device, one commit and one way of measuring. Other files of an item lie beside these.
"""

import csv
import dataclasses
import io
import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lowband.bench.gpu.families import FAMILIES, sources_sha256
from lowband.errors import UserError
from lowband.spec.files import write_whole
from lowband.spec.kernel_rows import STAMP, KernelRow

ITEMS, ENVIRONMENT, ROWS = "items.json", "environment.json", "kernels.csv"
SAME = ("device", "commit", "torch", "triton", "measurement_version", "is_interpreted")
_COLUMNS = [field.name for field in dataclasses.fields(KernelRow)]


@dataclass(frozen=True)
class Entry:
    """An item's entry in items.json."""

    family: str
    outcome: str
    reason: str
    seconds: float
    sources_sha256: str
    rows: list[dict[str, Any]]

    @classmethod
    def of(
        cls, family: str, outcome: str, reason: str, seconds: float, rows: list[dict[str, Any]]
    ) -> "Entry":
        """An entry of today's files."""
        return cls(family, outcome, reason, seconds, sources_sha256(family), rows)


class Folder:
    """environment: of all entries, as environment.json holds it"""

    def __init__(self, path: Path, environment: dict[str, Any], entries: dict[str, Entry]) -> None:
        self.path, self.environment, self.entries = path, environment, entries

    @classmethod
    def read(cls, path: Path) -> "Folder":
        """Raises UserError for a folder that `lowband gpu` did not write, or that is damaged."""
        try:
            environment = json.loads((path / ENVIRONMENT).read_text(encoding="utf-8"))
            found = json.loads((path / ITEMS).read_text(encoding="utf-8"))
            entries = {name: Entry(**entry) for name, entry in found.items()}
            sound = all(name in environment for name in SAME) and all(map(_is_sound, entries.values()))
        except FileNotFoundError as error:
            name = Path(error.filename).name
            raise UserError(f"no {name}", where=path, allowed="a folder of `lowband gpu --out`") from None
        except (ValueError, TypeError, AttributeError, RecursionError):
            sound = False
        if not sound:
            raise UserError(f"{ITEMS} or {ENVIRONMENT} is damaged", where=path, allowed="files as written")
        return cls(path, environment, entries)

    @classmethod
    def begin(cls, path: Path, environment: dict[str, Any], earlier: Path | None) -> "Folder":
        """A folder to write to, with what an earlier call left if `earlier` names its folder.

        Raises UserError if that is of another device, commit or way of measuring, and for a folder that has
        rows already.
        """
        if (path / ITEMS).exists() and (earlier is None or earlier.resolve() != path.resolve()):
            raise UserError("has rows already", where=path, allowed=f"a new folder, or --from {path}")
        if earlier is None:
            begun = cls(path, environment, {})
        else:
            before = cls.read(earlier)
            before.refuse_other(environment)
            if earlier.resolve() != path.resolve():
                _copy(earlier, path)
            begun = cls(path, environment, before.entries)
        write_whole(path / ENVIRONMENT, json.dumps(environment, indent=2) + "\n")
        begun._write()
        return begun

    def refuse_other(self, environment: dict[str, Any]) -> None:
        """Raise UserError if its rows are not of this device, commit and way of measuring."""
        for key in SAME:
            if self.environment[key] != environment[key]:
                what = f"rows of {key} {self.environment[key]}, and here it is {environment[key]}"
                raise UserError(what, where=self.path, allowed="the same, or a folder of their own")

    def has(self, name: str, family: str) -> bool:
        """Whether an item was run, to a good end, on today's files of its family."""
        entry = self.entries.get(name)
        return entry is not None and entry.outcome == "ok" and entry.sources_sha256 == sources_sha256(family)

    def keep(self, name: str, entry: Entry) -> None:
        self.entries[name] = entry
        self._write()

    def _write(self) -> None:
        items = {name: dataclasses.asdict(entry) for name, entry in self.entries.items()}
        write_whole(self.path / ITEMS, json.dumps(items, indent=1) + "\n")
        text = io.StringIO()
        writer = csv.DictWriter(text, [*_COLUMNS, *STAMP], lineterminator="\n")
        writer.writeheader()
        stamp = {key: self.environment[key] for key in STAMP}
        writer.writerows(row | stamp for entry in self.entries.values() for row in entry.rows)
        write_whole(self.path / ROWS, text.getvalue())


def _copy(folder: Path, to: Path) -> None:
    """Copy the files, not the rights: what came back from a device may be read-only."""
    for path in folder.rglob("*"):
        if path.is_file():
            target = to / path.relative_to(folder)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, target)


def _is_sound(entry: Entry) -> bool:
    texts = (entry.outcome, entry.reason, entry.sources_sha256)
    return (
        entry.family in FAMILIES
        and all(isinstance(text, str) for text in texts)
        and isinstance(entry.seconds, int | float)
        and all(set(row) == set(_COLUMNS) for row in entry.rows)
        and all(isinstance(cell, str | int | float | None) for row in entry.rows for cell in row.values())
    )
