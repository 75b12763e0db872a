"""One exception type for everything a user can get wrong."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any


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
        text = f"{self.where}: {self.what}" if self.where else self.what
        return f"{text} (allowed: {self.allowed})" if self.allowed else text


def _rebuilt(cls: type[UserError], what: str, where: str, allowed: str) -> UserError:
    """Unpickle a UserError: ranks send each other their errors."""
    return cls(what, where=where, allowed=allowed)
