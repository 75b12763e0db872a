"""Values that are elsewhere between an optimizer's steps: whoever would read them then gets a UserError.

torch would read memory that they do not have, and the process would end. Within a step (units.turns) they
have it, and nothing is checked.
"""

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, Protocol

import torch

from lowband.engine.units.by_element import Kind, kind_of, name_of
from lowband.errors import UserError

FACTS_OF_VALUES = frozenset(["numpy", "tolist", "__array__", "__repr__", "__format__"])
_ONLY_AS_LARGE = frozenset(["zeros_like", "ones_like", "empty_like", "full_like"])


class Disk(Protocol):
    """Where values lie (units.on_disk)."""

    @property
    def place(self) -> str:
        """The same in words."""

    @property
    def is_readable(self) -> bool:
        """Whether they are in memory, and stay there."""

    def frees_gradients(self) -> None:
        """Return when gradients of the last step may change."""


class Lies(NamedTuple):
    """Attribute `on_disk` of values: where they lie, and what they are called."""

    disk: Disk
    name: str


class StateOnDisk(torch.Tensor):
    """What an optimizer keeps of each element of a shard; what is computed from it is plain."""

    on_disk: Lies

    @classmethod
    def of(cls, value: torch.Tensor, lies: Lies) -> "StateOnDisk":
        """The same memory."""
        made = value.as_subclass(cls)
        made.on_disk = lies
        return made

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        check_present(func, args, kwargs or {})
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.clone().__reduce_ex__(protocol)

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        memo[id(self)] = copied = self.clone()
        return copied


def check_present(func: Callable[..., Any], args: Iterable[Any], kwargs: dict[str, Any]) -> None:
    """Raises UserError if the function reads or writes what is on a disk now."""
    name = name_of(func)
    if (kind_of(func) is not Kind.FACT or name in FACTS_OF_VALUES) and name not in _ONLY_AS_LARGE:
        refuse_absent(args)
        refuse_absent(kwargs.values())


def refuse_absent(values: Iterable[Any]) -> None:
    """Raises UserError if one of them, or of lists of them, is on a disk now."""
    for value in values:
        if isinstance(value, list | tuple):
            refuse_absent(value)
        elif (lies := getattr(value, "on_disk", None)) and not lies.disk.is_readable:
            raise UserError(
                f"its values are {lies.disk.place} between steps",
                where=lies.name,
                allowed="lowband.full_state_dict, lowband.Checkpointer",
            )
