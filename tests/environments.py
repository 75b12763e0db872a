"""What the package requires with some of its extras, and an environment that has nothing else.

By pyproject.toml and the metadata of what is installed here; its files are linked to, so that nothing is
fetched or compiled.
"""

import subprocess
import sys
import tomllib
from collections.abc import Iterable
from importlib.metadata import distribution
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.checkout import ROOT

REPORT = ("report", "workflow")  # the extras of `make figures`


def required(*extras: str) -> set[str]:
    """The packages that ours requires with these extras, directly or not."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    of_extras = [line for extra in extras for line in project["optional-dependencies"][extra]]
    asked = [Requirement(line) for line in (*project["dependencies"], *of_extras)]
    seen = {(one.name, frozenset(one.extras)) for one in asked}
    for one in asked:
        for inner in map(Requirement, distribution(one.name).requires or []):
            key = (inner.name, frozenset(inner.extras))
            if key not in seen and _holds(inner, one.extras):
                seen.add(key)
                asked.append(inner)
    return {canonicalize_name(name) for name, _ in seen}


def _holds(requirement: Requirement, extras: Iterable[str]) -> bool:
    marker = requirement.marker
    return marker is None or any(marker.evaluate({"extra": extra}) for extra in ("", *extras))


def link(packages: set[str], folder: Path) -> None:
    """Links to the packages' files, as if they alone were installed."""
    folder.mkdir()
    for package in packages:
        for name in {file.parts[0] for file in distribution(package).files or []} - {"..", "__pycache__"}:
            link = folder / name
            if not link.exists():
                link.symlink_to(Path(str(distribution(package).locate_file(name))))


def made(folder: Path, *extras: str) -> Path:
    """The `python` of a virtual environment in a new folder, with what the extras require, without ours."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    [packages] = folder.glob("lib/python*/site-packages")
    link(required(*extras), folder / "required")
    (packages / "required.pth").write_text(f"{folder / 'required'}\n")
    return folder / "bin" / "python"
