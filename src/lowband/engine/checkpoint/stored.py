"""What a reader of other programs' checkpoints offers, and how their files are unpickled: never to code."""

import io
import pickle
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch

from lowband.engine.checkpoint.manifest import Number
from lowband.errors import UserError


@dataclass(frozen=True)
class Stored:
    """A whole tensor in a checkpoint.

    read: maps the first element and the number of elements of the flattened tensor to the values, 1D
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    read: Callable[[int, int], torch.Tensor]


class Reader(ABC):
    """One checkpoint of another program, by the module's names.

    has_states: whether it has an optimizer's states under names of parameters
    """

    folder: Path
    has_states = True

    @abstractmethod
    def tensor(self, name: str) -> Stored | None:
        """A parameter's fp32 values, or a buffer; None if there is none."""

    @abstractmethod
    def states(self, name: str) -> dict[str, Stored | Number]:
        """The optimizer's states of a parameter, by key; those of a parameter's shape are sharded."""

    @abstractmethod
    def options(self, name: str) -> dict[str, Any]:
        """The options of the param group of a parameter, as far as they were saved."""

    @abstractmethod
    def extra(self) -> dict[str, Any]:
        """What was saved beside model and optimizer; of DCP's no large tensors, nor what only code reads."""


def whole(value: torch.Tensor) -> Stored:
    """A tensor that has been read."""
    flat = value.detach().reshape(-1)
    return Stored(value.dtype, tuple(value.shape), lambda start, count: flat[start : start + count])


class HasObjects(UserError):
    """A file has objects that cannot be read without running code."""


@contextmanager
def read_as_damaged(folder: Path) -> Iterator[None]:
    """Whatever a damaged checkpoint raises, as a UserError that names its folder."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        raise UserError(f"is damaged: {type(error).__name__}: {_cause(error)}", where=folder) from None


class Inert:
    """In place of an object that is of no use here: it keeps nothing and does nothing."""

    def __init__(self, *_: object) -> None: ...

    def __setstate__(self, _: object) -> None: ...


# In what torch says of a class that it does not load, not of bytes that are no pickle.
_OF_CLASSES = "GLOBAL", "call reduce", "Can only create new object", "Can only build", "must be imported"


def load_tensors(source: Path | BinaryIO, where: Path, inert: tuple[str, ...] = ()) -> Any:
    """The content of a file of torch.save, with tensors on the CPU; those of a path stay on the disk.

    inert: full names of classes of which the file may have objects; each becomes an Inert
    Raises UserError for a file that is damaged, or has objects of any other class.
    """
    known: list[Any] = [(type(name.rpartition(".")[2], (Inert,), {}), name) for name in inert]
    try:
        with torch.serialization.safe_globals(known):
            return torch.load(
                source, map_location="cpu", weights_only=True, mmap=True if isinstance(source, Path) else None
            )
    except pickle.UnpicklingError as error:
        if not any(word in str(error) for word in _OF_CLASSES):
            raise UserError(f"is damaged: {_cause(error)}", where=where) from None
        raise HasObjects(f"has other objects than tensors: {_cause(error)}", where=where) from None
    except OSError as error:
        raise UserError(f"cannot be read: {error.strerror or error}", where=where) from None
    except (RuntimeError, ValueError, KeyError, EOFError, TypeError, AssertionError) as error:
        raise UserError(f"is damaged: {_cause(error)}", where=where) from None


def load_plain(path: Path, classes: Mapping[tuple[str, str], Any]) -> Any:
    """The content of a pickle that has objects of these classes only: (module, name) -> what is made of it.

    Raises UserError for a file that is damaged, or has objects of any other class.
    """
    try:
        return _Restricted(io.BytesIO(path.read_bytes()), classes).load()
    except OSError as error:
        raise UserError(f"cannot be read: {error.strerror}", where=path) from None
    except Exception as error:  # a damaged pickle may raise anything; what it may call is in `classes`
        raise UserError(f"is damaged, or has other objects: {_cause(error)}", where=path) from None


class _Restricted(pickle.Unpickler):
    """Python's documented way to restrict globals (docs.python.org, "Restricting Globals")."""

    def __init__(self, file: BinaryIO, classes: Mapping[tuple[str, str], Any]) -> None:
        super().__init__(file)
        self._classes = classes

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in self._classes:
            raise pickle.UnpicklingError(f"{module}.{name}")
        return self._classes[module, name]


def _cause(error: Exception) -> str:
    text = str(error)
    with suppress(ValueError):  # torch's message is a page: the name of the class is what matters
        start = text.index("Unsupported global: GLOBAL ") + len("Unsupported global: GLOBAL ")
        return text[start:].split(maxsplit=1)[0]
    return (text.splitlines() or [type(error).__name__])[0][:200]
