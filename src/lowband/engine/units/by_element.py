"""Which of torch's functions are right on a part of a tensor: those that work element by element.

torch tags its own operators (`torch.Tag.pointwise`), so only what is not computed has a list here. What is in
none of the kinds mixes elements: a norm, a product, a sort.
"""

from collections.abc import Callable
from enum import Enum
from functools import cache
from typing import Any

import torch


class Kind(Enum):
    """What a function does with a part of a tensor.

    FACT:    tells a fact about it, or makes a tensor that is only as large
    COPY:    makes a plain tensor of it
    SAME:    gives its values another type or place, or makes a tensor of the same shape
    MOVE:    gives its values, or some of them, another shape, type or place
    ELEMENT: computes each element from those at its place
    DRAW:    draws random values for it
    INDEX:   reads or writes some of them
    MIX:     anything else
    """

    FACT = "fact"
    COPY = "copy"
    SAME = "same"
    MOVE = "move"
    ELEMENT = "element"
    DRAW = "draw"
    INDEX = "index"
    MIX = "mix"


_FACTS = (
    "size stride numel nelement dim ndimension storage_offset element_size data_ptr untyped_storage "
    "is_set_to "
    "is_contiguous is_floating_point is_complex is_signed is_neg is_conj is_inference is_same_size is_pinned "
    "is_shared get_device result_type can_cast record_stream _is_view _typed_storage numpy tolist __array__ "
    "requires_grad_ retain_grad new_zeros "
    "new_ones new_empty new_full new_tensor _has_compatible_shallow_copy_type _use_count __set__ __delete__ "
    "new resize_as_ __hash__ __len__ __repr__ __format__ __dir__ "
    "_fused_adam_ _fused_adamw_ _fused_sgd_ _fused_adagrad_"
)
_SAMES = (
    "clone _foreach_clone detach detach_ to type type_as float double half bfloat16 bool int long short byte "
    "char cpu cuda contiguous alias _foreach_detach data pin_memory share_memory_ "
    "zeros_like ones_like empty_like full_like"
)
# Without `chunk` and `tensor_split`, by which DTensor divides whole parameters.
_MOVES = (
    "view view_as reshape reshape_as flatten ravel squeeze unsqueeze split narrow "
    "unbind cat concat concatenate stack hstack real imag "
    "resolve_conj resolve_neg conj conj_physical"
)
# Not `chunk` and `tensor_split`: so many parts are meant of the whole, as DTensor does to divide a parameter.
PARTS = frozenset(["split", "narrow", "unbind"])  # of what is moved
# Element by element, or the same for all of them, and not tagged so.
_ELEMENTS = (
    "copy zero fill constant masked_fill "
    "isfinite multiply divide true_divide subtract negative absolute clip float_power arccos arccosh arcsin "
    "arcsinh arctan arctan2 arctanh greater greater_equal less less_equal not_equal isreal signbit fix "
    "floor_divide"
)
_DRAWS = (
    "normal normal_ uniform_ random_ bernoulli bernoulli_ exponential_ cauchy_ log_normal_ geometric_ "
    "rand_like randn_like randint_like"
)
# Tagged, or with an operator that is, and yet of all elements.
_MIXES = frozenset(["max", "min", "equal"])
_TRANSPOSES = "T mT H mH"  # attributes
_PYTHON = {"truediv": "div", "floordiv": "floor_divide", "mod": "remainder", "invert": "bitwise_not"}
_KINDS = {
    name: kind
    for kind, names in (
        (Kind.FACT, _FACTS),
        (Kind.COPY, "as_subclass"),
        (Kind.SAME, _SAMES),
        (Kind.MOVE, _MOVES),
        (Kind.DRAW, _DRAWS),
        (Kind.INDEX, "__getitem__ __setitem__"),
        (Kind.MIX, _TRANSPOSES),
    )
    for name in names.split()
}
_BY_ELEMENT = frozenset(_ELEMENTS.split())


@cache
def kind_of(function: Callable[..., Any]) -> Kind:
    """The kind of a function as torch hands it to `__torch_function__`."""
    name = name_of(function)
    if getattr(function, "__name__", "") == "__get__":
        return _KINDS.get(name, Kind.FACT)
    return _KINDS.get(name) or (Kind.ELEMENT if _is_by_element(name) else Kind.MIX)


def name_of(function: Callable[..., Any]) -> str:
    """Of a function, or of the attribute that it reads."""
    name: str = getattr(function, "__name__", "")
    return getattr(getattr(function, "__self__", None), "__name__", "") if name == "__get__" else name


def _is_by_element(name: str) -> bool:
    """Whether a function of that name, of lists, in place or an operator of Python included, is."""
    plain = name.removeprefix("_foreach_").strip("_")
    plain = _PYTHON.get(plain, plain)
    names = [plain]
    if name.startswith("__"):  # __radd__, __iadd__, __rtruediv__
        names += [_PYTHON.get(plain[1:], plain[1:]), f"bitwise_{plain}", f"bitwise_{plain[1:]}"]
    return any(each in _BY_ELEMENT or _is_tagged(each) for each in names)


def _is_tagged(name: str) -> bool:
    packet = getattr(torch.ops.aten, name, None) if name and name not in _MIXES else None
    if packet is None:
        return False
    return any(torch.Tag.pointwise in getattr(packet, overload).tags for overload in packet.overloads())
