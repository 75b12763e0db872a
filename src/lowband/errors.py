"""One exception type for everything a user can get wrong; what to install where a package is missing."""

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

LONGEST = 1500  # characters of what is wrong, and of what is allowed, in a message


class UserError(Exception):
    """Bad input: printed as one line, exit code 2, no traceback.

    what:    what is wrong
    where:   file and key, as far as known
    allowed: what would be accepted
    """

    def __init__(self, what: str, *, where: str | Path = "", allowed: str | Iterable[object] = ()) -> None:
        self.what, self.where = what, str(where)
        self.allowed = allowed if isinstance(allowed, str) else ", ".join(map(str, allowed))
        super().__init__(what)

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuilt, (type(self), self.what, self.where, self.allowed)

    def __str__(self) -> str:
        text = f"{_line(self.where)}: {_line(self.what)}" if self.where else _line(self.what)
        return f"{text} (allowed: {_line(self.allowed)})" if self.allowed else text


def _line(text: str) -> str:
    """The text in one printable line of bounded length: it may quote a stranger's file."""
    if len(text) > LONGEST:
        text = f"{text[:LONGEST]} ..."
    return text if text.isprintable() else "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


def _rebuilt(cls: type[UserError], what: str, where: str, allowed: str) -> UserError:
    """Unpickle a UserError: ranks send each other their errors."""
    return cls(what, where=where, allowed=allowed)


def install(package: str) -> str:
    """The command that installs lowband's extra with a package; empty if no extra has it."""
    from importlib.metadata import PackageNotFoundError, requires  # slow to import, and rarely needed

    try:
        needed = requires("lowband") or []
    except PackageNotFoundError:  # a tree that is not installed
        return ""
    package = {"mlflow": "mlflow-skinny"}.get(package, package)  # not named as what is imported
    package = package.lower().replace("_", "-")  # pytorch_optimizer is in pytorch-optimizer
    of_an_extra = (re.match(r"([\w.-]+).*extra == ['\"](\w+)['\"]", line) for line in needed)
    extras = [found[2] for found in of_an_extra if found and found[1].lower() == package]
    return f"pip install 'lowband[{extras[0]}]'" if extras else ""


def with_hint(error: ModuleNotFoundError, what: str) -> ModuleNotFoundError:
    """The error in one line that names the extra to install; unchanged if no extra brings the package.

    what: needs the package
    """
    package = (error.name or "").partition(".")[0]
    command = install(package)
    return ModuleNotFoundError(f"{what} needs {package}: {command}", name=error.name) if command else error
