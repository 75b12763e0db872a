"""SHA256SUMS of the shipped data, in the format of `sha256sum`, and a check of the files against them."""

from pathlib import Path

from lowband.errors import UserError
from lowband.spec.csv_tables import sha256
from lowband.spec.files import write_if_changed
from lowband.spec.plain_data import read_text

SUMS = "SHA256SUMS"
DIGITS = 64  # of a checksum
NO_DATA = (SUMS, "README.md")
FOLDERS = ("results/reference", "results/reported")


def write_sums(root: Path) -> None:
    """Write a SHA256SUMS in each of FOLDERS, for all data below it."""
    for folder in FOLDERS:
        sums = _sums(root / folder)
        text = "".join(f"{digest}  {path}\n" for path, digest in sums.items())
        write_if_changed(root / folder / SUMS, text)


def verify(root: Path) -> tuple[int, list[str]]:
    """The number of files that match, and a line for each that is changed, missing or not listed.

    Raises UserError for a list that cannot be read.
    """
    good, wrong = 0, []
    for folder in FOLDERS:
        listed = _listed(root / folder / SUMS)
        found = _sums(root / folder)
        for path in sorted({*listed, *found}):
            where = f"{folder}/{path}"
            if path not in found:
                wrong.append(f"{where}: missing")
            elif path not in listed:
                wrong.append(f"{where}: not in {SUMS}")
            elif listed[path] != found[path]:
                wrong.append(f"{where}: changed")
            else:
                good += 1
    return good, wrong


def _sums(folder: Path) -> dict[str, str]:
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path.name not in NO_DATA)
    return {path.relative_to(folder).as_posix(): sha256(path) for path in files}


def _listed(path: Path) -> dict[str, str]:
    listed = {}
    for number, line in enumerate(read_text(path).splitlines(), start=1):
        digest, separator, name = line.partition("  ")
        if not separator or len(digest) != DIGITS:
            raise UserError("not a checksum line", where=f"{path}:{number}", allowed="<sha256>  <path>")
        listed[name] = digest
    return listed
