"""Values of a shard or of its gradient: tensors that refuse what is right only on the whole.

torch.nn.utils.clip_grad_norm_ would give each rank the norm of its own shards, and each rank would scale by a
different factor. A GradScaler would find infinities on some ranks only, and only those would skip their step.
A parameter that is used outside of the module's forward would compute with a part, and its gradient would be
this rank's. So whatever is not computed element by element (units.by_element) raises UserError, on shards,
on their gradients, and on what was computed or copied from them. `as_subclass` makes a plain tensor of it.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, ClassVar, NoReturn
from weakref import WeakValueDictionary

import torch

from lowband.engine.units.absent import FACTS_OF_VALUES, Disk, check_present
from lowband.engine.units.by_element import PARTS, Kind, kind_of, name_of
from lowband.engine.units.seen_whole import SeenWhole
from lowband.engine.units.shard_of import ShardOf
from lowband.errors import UserError

# Each access of an optimizer to a shard comes by here: globals are found sooner than members of an Enum.
FACT, ELEMENT = Kind.FACT, Kind.ELEMENT
_FLAT_OF = "_flat_of"  # attribute of a view of a part that is no view of the whole: its shard_of


class ShardValues(SeenWhole):
    """Values of a shard, or computed from them element by element; of any shape and dtype."""

    what: ClassVar[str] = "a shard covers this rank's part only"
    computed_in: ClassVar[str] = (
        "parameters inside of their unit's forward (of no unit: the sharded module's), which may call other "
        "methods"
    )
    allowed: ClassVar[str] = (
        f"{computed_in}; lowband.norms; p.detach().as_subclass(torch.Tensor) for this rank's part"
    )

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        check_present(func, args, kwargs or {})  # a shard that they are computed with
        return on_part(cls, func, args, kwargs or {})

    def detach_(self) -> "ShardValues":
        """As of a gradient that is no view of a bucket, before it is set to zero: it has no graph."""
        return self

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.as_subclass(torch.Tensor).__reduce_ex__(protocol)

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        memo[id(self)] = copied = self.clone()
        return copied

    def __repr__(self) -> str:  # type: ignore[override]
        return repr(self.as_subclass(torch.Tensor))


class ShardGrad(ShardValues):
    """The gradient of a shard, or what was computed from it element by element."""

    what = "a shard's gradient covers this rank's part only"
    allowed = (
        "lowband.clip_grad_norm_(module, max_norm), which returns the norm over all ranks; "
        "p.grad.as_subclass(torch.Tensor) for this rank's part"
    )

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if _taken and (kind_of(func) is not FACT or name_of(func) in FACTS_OF_VALUES):
            _wait_for_updates([*args, *(kwargs or {}).values()])
        check_present(func, args, kwargs or {})
        return on_part(cls, func, args, kwargs or {})


# Who updates behind a step, by the storage of gradients that it may not have read.
_taken: WeakValueDictionary[int, Disk] = WeakValueDictionary()


def take_gradient(grad: torch.Tensor, disk: Disk) -> torch.Tensor:
    """A shard's gradient for an update behind a step: until its end who uses it, or a view of it, waits.

    One that others have set is copied: nobody sees what they write to their own tensor.
    """
    if not isinstance(grad, ShardGrad):
        return grad.detach().clone()
    with torch._C.DisableTorchFunctionSubclass():
        _taken[grad.untyped_storage()._cdata] = disk
        return grad.as_subclass(torch.Tensor)


def give_back_gradients(disks: Collection[Disk]) -> None:
    """The updates of these have ended."""
    for storage in [storage for storage, disk in _taken.items() if disk in disks]:
        _taken.pop(storage, None)


def _wait_for_updates(values: Iterable[Any]) -> None:
    """Return when gradients among the values, or in lists of them, are those of no update on its way."""
    for value in values:
        if isinstance(value, list | tuple):
            _wait_for_updates(value)
        elif isinstance(value, ShardGrad):
            with torch._C.DisableTorchFunctionSubclass():
                disk = _taken.get(value.untyped_storage()._cdata)
            if disk is not None:
                disk.frees_gradients()


def on_part(
    part: type[ShardValues], func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Any:
    """The function's result, in which values of the shard are marked as `part`.

    Raises UserError if the function mixes elements, if a part meets an activation, or if autograd would
    differentiate with respect to a part.
    """
    kind = kind_of(func)
    with torch._C.DisableTorchFunctionSubclass():
        if kind is FACT:
            return func(*args, **kwargs)
        if kind is Kind.DRAW:
            _refuse_draw(func, (*args, *kwargs.values()))
        if (
            kind is Kind.MIX
            or (kind is ELEMENT and _meets_another_part((*args, *kwargs.values()) if kwargs else args))
            or (kind is Kind.INDEX and not _keeps_places(args))
            or (kind is Kind.MOVE and name_of(func) in PARTS and _whole_of(_first(args, kwargs)))
        ):
            _refuse(part, func, (*args, *kwargs.values()))
        result = func(*args, **kwargs)
        if kind is ELEMENT or kind is Kind.INDEX:
            _mark_written(part, args, kwargs, result)
        is_type_of = kind is Kind.SAME and args and type(args[0]) is torch.Tensor
        if is_type_of or result is _first(args, kwargs):  # plain, of its type; in place
            return result
        keeps = kind is ELEMENT or kind is Kind.SAME
        if not isinstance(result, torch.Tensor):
            if not isinstance(result, list | tuple):
                return result
            if func is torch.where:  # of a condition alone: places in this part
                _refuse(part, func, (*args, *kwargs.values()))
            is_paired = keeps and args and isinstance(args[0], list | tuple) and len(args[0]) == len(result)
            sources = args[0] if is_paired else [None] * len(result)
            return type(result)(_marked(part, each, (of,)) for each, of in zip(result, sources, strict=True))
        if kind is ELEMENT and result.requires_grad:
            _refuse(part, func, (*args, *kwargs.values()))
        if kind is Kind.COPY and not result.requires_grad:
            return result.as_subclass(torch.Tensor)
        marked = _marked(part, result, args if keeps else ())
        of = _moved_of(func, _first(args, kwargs)) if kind is Kind.MOVE else None
        if of is not None:
            setattr(marked, _FLAT_OF, of)
        return marked


def _first(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    return args[0] if args else next(iter(kwargs.values()), None)


def _moved_of(func: Callable[..., Any], moved: Any) -> ShardOf | None:
    """The parameter whose rows what is moved has not. Joined parts of several may be cut apart again, as by
    `vector_to_parameters`.
    """
    if isinstance(moved, list | tuple):
        moved = moved[0] if len(moved) == 1 or name_of(func) == "stack" else None
    return _whole_of(moved)


def _refuse_draw(func: Callable[..., Any], values: tuple[Any, ...]) -> NoReturn:
    """Ranks with one seed would repeat the same values in all parts; with several, copies of a part would
    differ.
    """
    raise UserError(
        f"{func.__name__} draws values for this rank's part only",
        where=_name(values),
        allowed="initial values before lowband.shard, or by its init=; torch.randn(p.shape) for noise of "
        "each rank's own",
    )


def _refuse(part: type[ShardValues], func: Callable[..., Any], values: tuple[Any, ...]) -> NoReturn:
    shards = [value for value in values if hasattr(value, "shard_of")]
    if kind_of(func) is ELEMENT and len({(shard.shape, shard.shard_of.start) for shard in shards}) > 1:
        raise UserError(
            f"{name_of(func)} of shards that cover other parts of their parameters",
            where=" and ".join(dict.fromkeys(shard.shard_of.name for shard in shards)),
            allowed="a teacher and its student in a lowband.shard each, with the same wrap, and units frozen "
            "as a whole or not at all",
        )
    what = f"{name_of(func) or repr(func)} of {part.what}"
    raise UserError(what, where=_name(values), allowed=part.allowed)


def _name(values: tuple[Any, ...]) -> str:
    """Of the first shard among them."""
    return next((of.name for value in values if (of := _whole_of(value)) is not None), "")


def _marked(part: type[ShardValues], value: Any, sources: Sequence[Any]) -> Any:
    """sources: of which one may be of a parameter that the value is of, too"""
    if not isinstance(value, torch.Tensor):
        return value
    marked = value.as_subclass(part)
    for source in sources:
        for name in ("shard_of", _FLAT_OF):
            if hasattr(source, name) and source.shape == value.shape:
                setattr(marked, name, getattr(source, name))
                return marked
    return marked


def _mark_written(
    part: type[ShardValues], args: Sequence[Any], kwargs: Mapping[str, Any], result: Any
) -> None:
    """Mark plain tensors that have got values of the shard: in place, by `out=` or by index."""
    written = kwargs.get("out")
    if written is None and args and (result is None or result is args[0]):
        written = args[0]
    are_several = isinstance(written, list | tuple)
    for place, each in enumerate(written if are_several else (written,)):
        if type(each) is torch.Tensor and not each.requires_grad:
            each.__class__ = part  # type: ignore[assignment]
            sources = [by[place] if are_several and isinstance(by, list | tuple) else by for by in args]
            for of in (_whole_of(by) for by in sources if getattr(by, "shape", None) == each.shape):
                if of is not None:
                    setattr(each, _FLAT_OF, of)


def _meets_another_part(values: tuple[Any, ...]) -> bool:
    """Whether tensors differ in shape, but for single numbers that are no part: one is an activation. Or
    whether parts begin at other elements of their parameters.
    """
    shape = start = None
    for value in values:
        if isinstance(value, torch.Tensor):
            own = value.shape
            if own != shape and (value.numel() != 1 or isinstance(value, ShardValues)):
                if shape is not None:
                    return True
                shape = own
            of = getattr(value, "shard_of", None)
            if of is not None and of.start != of.stop:
                if start is not None and start != of.start:
                    return True
                start = of.start
    return False


def _keeps_places(args: tuple[Any, ...]) -> bool:
    """Whether an index reads or writes the same on a part as on the whole.

    args: what is indexed, the index and, to be written, values
    """
    indexed, index = args[0], args[1]
    if isinstance(index, torch.Tensor):
        return index.dtype == torch.bool and index.shape == indexed.shape
    if index is Ellipsis or index == slice(None):
        return True
    return _whole_of(indexed) is None and isinstance(index, int | slice)


def _whole_of(values: Any) -> ShardOf | None:
    """The parameter that the values are of, whose rows and first elements are none of theirs."""
    of: ShardOf | None = getattr(values, "shard_of", None) or getattr(values, _FLAT_OF, None)
    return of
