"""Parameters, and views of them, whose values must not be used any more; facts about them may be asked for.

[Note: old views] A module may keep a view of a weight from before `lowband.shard`, made in its `__init__`. It
would show the old values for ever, without an error. Those that attributes and buffers hold are marked; one
that is hidden elsewhere, in a closure say, is noticed when a gradient comes through it to the old parameter.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, NoReturn

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_leaves

from lowband.engine.units.by_element import Kind, kind_of
from lowband.engine.units.shard_parameter import Leaf
from lowband.errors import UserError


class Unusable(torch.Tensor):
    """A tensor that refuses its use.

    place: where it belongs to
    """

    what: ClassVar[str]
    allowed: ClassVar[str]
    place: str

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if kind_of(func) is not Kind.FACT:
            found = (value.place for value in args if isinstance(value, cls))
            raise UserError(f"{func.__name__} of {cls.what}", where=next(found, ""), allowed=cls.allowed)
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    def __hash__(self) -> int:
        return id(self)


class ReplacedParameter(Unusable, nn.Parameter):
    """A whole parameter from before sharding: whoever still refers to it would see its old values."""

    what = "a parameter from before lowband.shard or parallelize, which has kept its old values"
    allowed = "the module's own attribute, read in its forward"


class ReplacedView(Unusable):
    """A view of one. See [Note: old views]."""

    what = "a view of a parameter from before lowband.shard, which has kept its old values"
    allowed = "a view made in the forward"


class DroppedParameter(Unusable, nn.Parameter):
    """A gathered parameter that a forward has kept and whose unit was dropped: it has no memory."""

    what = "a weight that was dropped after its unit's forward"
    allowed = "what is computed from it in that forward; a copy of it (.clone()) made there"


def mark_replaced(parameter: nn.Parameter, place: str) -> None:
    """Have a parameter whose place in the module a shard has taken refuse its use, and gradients."""

    def refuse(_: torch.Tensor) -> NoReturn:
        raise UserError(
            "a gradient comes to a parameter from before lowband.shard, and would be lost",
            where=place,
            allowed="views of parameters made in the forward",
        )

    if parameter.requires_grad and not isinstance(parameter, FakeTensor):
        parameter.register_hook(refuse)
    _mark(parameter, ReplacedParameter, place)


def mark_dropped(leaves: Sequence[Leaf]) -> None:
    """Have a unit's leaves, without memory, refuse their use."""
    if not isinstance(leaves[0], FakeTensor):
        for leaf in leaves:
            leaf.__class__ = DroppedParameter  # type: ignore[assignment]


def mark_gathered(leaves: Sequence[Leaf]) -> None:
    """Take back `mark_dropped`."""
    if type(leaves[0]) is DroppedParameter:
        for leaf in leaves:
            leaf.__class__ = Leaf


def _mark(tensor: torch.Tensor, kind: type[Unusable], place: str) -> None:
    if not isinstance(tensor, FakeTensor):
        tensor.__class__ = kind  # type: ignore[assignment]
        tensor.place = place  # type: ignore[attr-defined]


def mark_views(module: nn.Module) -> None:
    """Have views of the module's parameters refuse their use. See [Note: old views].

    Raises UserError for two parameters of the same values in memory, of which each would be trained alone.
    """
    parameters = dict(module.named_parameters())
    names: dict[int, str] = {}
    for name, parameter in parameters.items():
        if (storage := _storage(parameter)) is not None:
            names.setdefault(storage, name)
    _check_apart(module, parameters)
    own = {id(parameter) for parameter in parameters.values()}
    for prefix, owner in module.named_modules():
        for attribute, tensor in _held(owner):
            name = names.get(_storage(tensor) or 0)
            if name is not None and id(tensor) not in own and type(tensor) in (torch.Tensor, nn.Parameter):
                _mark(tensor, ReplacedView, f"{prefix}.{attribute}".removeprefix(".") + f", of '{name}'")


def _held(owner: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Tensors in a module's attributes, in containers of them and in its buffers, by attribute."""
    registered = ("_parameters", "_modules", "_buffers")
    others = ((name, value) for name, value in vars(owner).items() if name not in registered)
    for attribute, value in (*owner._buffers.items(), *others):
        for each in tree_leaves(value):
            if isinstance(each, torch.Tensor):
                yield attribute, each


def _storage(tensor: torch.Tensor) -> int | None:
    """Where its values are; None where that cannot be said."""
    try:
        return tensor.untyped_storage()._cdata if tensor.numel() else None
    except (NotImplementedError, RuntimeError):  # e.g. a sparse tensor
        return None


def _check_apart(module: nn.Module, parameters: Mapping[str, nn.Parameter]) -> None:
    sharing: dict[int, list[str]] = {}
    for name, parameter in parameters.items():
        if (storage := _storage(parameter)) is not None and not parameter.is_meta:
            sharing.setdefault(storage, []).append(name)
    for names in sharing.values():
        for at, name in enumerate(names):
            for before in names[:at]:
                if _overlap(parameters[before], parameters[name]):
                    raise UserError(
                        f"'{name}' shares its memory with '{before}', and each would be trained alone",
                        where=type(module).__name__,
                        allowed="one parameter at both places",
                    )


def _overlap(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Whether two tensors of one storage have an element's memory in common."""
    if max(_start(first), _start(second)) >= min(_end(first), _end(second)):
        return False
    taken = torch.zeros(max(_end(first), _end(second)), dtype=torch.bool)  # by byte
    mine, theirs = (_bytes_of(each, taken) for each in (first, second))
    mine.fill_(True)
    return bool(theirs.any())


def _start(tensor: torch.Tensor) -> int:
    return tensor.storage_offset() * tensor.element_size()


def _end(tensor: torch.Tensor) -> int:
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return _start(tensor) + (last + 1) * tensor.element_size()


def _bytes_of(tensor: torch.Tensor, memory: torch.Tensor) -> torch.Tensor:
    """The bytes of a tensor in a picture of its storage."""
    width = tensor.element_size()
    strides = [stride * width for stride in tensor.stride()]
    return memory.as_strided([*tensor.shape, width], [*strides, 1], _start(tensor))
