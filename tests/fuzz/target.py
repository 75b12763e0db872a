"""What a target is: a parser of outside text, with a sound text to begin from."""

import csv
import io
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from lowband.__main__ import main as lowband
from tests.checkout import ROOT


class Refused(Exception):
    """The command line refused its input; the message went to stderr."""


class Hang(BaseException):
    """The time limit. Not an Exception, so that no parser can take it for an error of its own."""


def nothing(_: Path) -> None:
    pass


@dataclass(frozen=True)
class Target:
    """A parser.

    file: where its file lies, under the folder that `call` is given
    kind: how a mutation reads the file (mutate): yaml | json | lines | csv | words
    text: a sound file
    seal: applied to a changed file, where a checksum would hide the change
    prepare: puts what the parser reads besides into the folder
    is_fresh: whether `call` changes the folder, which is then made anew for each input
    more: further sound files, to begin from as well
    group: what it belongs to, in the table of docs/testing.md
    is_unfinished: whether even a sound file is refused in the end: its work needs more than the folder
    """

    name: str
    file: str
    kind: str
    text: str
    call: Callable[[Path], object]
    seal: Callable[[bytes], bytes] = bytes
    prepare: Callable[[Path], None] = nothing
    is_fresh: bool = False
    more: tuple[str, ...] = ()
    group: str = "configuration"
    is_unfinished: bool = False

    @property
    def sounds(self) -> list[bytes]:
        return [text.encode("utf-8", "surrogatepass") for text in (self.text, *self.more)]


def sound(path: str) -> str:
    return (ROOT / path).read_text(encoding="utf-8")


def entries(path: str, *names: str) -> str:
    """These entries of a YAML mapping of entries, and each that has a key or a kind of value of its own.

    A file of a hundred like entries would be read a hundred times as slowly, and show nothing more.
    """
    seen: set[tuple[str, str]] = set()
    kept: dict[str, Any] = {}
    for name, entry in yaml.safe_load(sound(path)).items():
        kinds = {(key, type(value).__name__) for key, value in entry.items()}
        if name in names or not kinds <= seen:
            kept[name] = entry
        seen |= kinds
    return yaml.safe_dump(kept, sort_keys=False)


def table(path: Path, rows: int = 12) -> str:
    """The header and the first rows of a CSV, cells as they are written."""
    with path.open(encoding="utf-8", newline="") as file:
        kept = [row for row, _ in zip(csv.reader(file), range(rows + 1), strict=False)]
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(kept)
    return text.getvalue()


def run(*words: object) -> None:
    """The command line, in this process. Raises Refused for exit code 2."""
    if lowband([str(word) for word in words]) == 2:
        raise Refused


def put(root: Path, file: str, text: str) -> None:
    path = root / file
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
