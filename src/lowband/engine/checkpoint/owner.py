"""Which module saves into a folder: one alone, for a checkpoint of a step replaces any other of that step."""

import gc
import weakref
from collections.abc import Callable
from pathlib import Path

from torch import nn

from lowband.engine.checkpoint.folder import newest_first
from lowband.errors import UserError


class Owner:
    """Of one Checkpointer and its folder."""

    def __init__(self, folder: Path, wait: Callable[[], None]) -> None:
        """wait: returns when the last save has ended"""
        self._folder = folder
        self._wait = weakref.WeakMethod(wait)
        self._module: Callable[[], nn.Module | None] = lambda: None  # what has saved last, if it is in use
        self.is_writing = False

    def check(self, module: nn.Module) -> None:
        """Raises UserError if another module that is still in use saves there, from which this one did not
        go on."""
        folder = self._folder.resolve()
        last = _LAST.get(folder, self)
        if folder in _LOADED.get(module, ()) or not (last.is_writing or newest_first(self._folder)):
            return
        if last._module() not in (None, module):
            gc.collect()  # a sharded module is freed by this alone: whether by now must not matter
        if last._module() not in (None, module):
            raise UserError(
                "another module saves its checkpoints here",
                where=self._folder,
                allowed="a folder for each module; load_newest first, to go on from these",
            )

    def wait_for_last(self) -> None:
        """Return when the last save into the folder has ended, by whichever Checkpointer of this process."""
        last = _LAST.get(self._folder.resolve(), self)
        if (wait := last._wait()) is not None:
            wait()

    def saves(self, module: nn.Module) -> None:
        """A save begins, until `is_writing` is false again."""
        self._module, self.is_writing = weakref.ref(module), True
        _LAST[self._folder.resolve()] = self

    @staticmethod
    def has_loaded(path: Path, module: nn.Module) -> None:
        """path: of the checkpoint"""
        _LOADED.setdefault(module, set()).add(path.resolve().parent)


_LAST: dict[Path, Owner] = {}  # of the last save of this process into a folder
_LOADED: weakref.WeakKeyDictionary[nn.Module, set[Path]] = weakref.WeakKeyDictionary()  # folders, by module
