"""Attributes that one forward sets, so that it finds its own again after others have run in between."""

from collections.abc import Callable, Iterable
from operator import is_
from typing import Any

from torch import nn

_MISSING = object()


class Attributes:
    """What one micro-batch's forward has bound to modules' attributes: side losses, statistics, maps, lists.

    Numbers and strings are left out: forwards may count in them. Parameters, buffers and submodules are not
    attributes here.
    """

    def __init__(self) -> None:
        self._watched: list[tuple[dict[str, Any], dict[str, Any]]] = []  # of each module: now, before
        self._mine: dict[tuple[int, str], tuple[dict[str, Any], Any]] = {}

    def watch(self, modules: Iterable[nn.Module]) -> None:
        """Note what is bound to modules before the forward goes on."""
        self._watched = [(vars(module), dict(vars(module))) for module in modules]

    def take(self, change: Callable[[Any], Any]) -> None:
        """Keep what has been bound since `watch`, each value changed by `change`."""
        for now, before in self._watched:
            if len(now) == len(before) and all(map(is_, now.values(), before.values())):
                continue
            for name, value in now.items():
                if value is before.get(name, _MISSING) or isinstance(value, int | float | str | None):
                    continue
                now[name] = change(value)
                self._mine[id(now), name] = now, now[name]
        self._watched = []

    def put(self) -> None:
        """Bind again what has been kept."""
        for (_, name), (attributes, value) in self._mine.items():
            attributes[name] = value
