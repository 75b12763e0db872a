"""A Triton kernel with its compile-time parameters, as `compile` compiles it for other machines."""

from typing import Any, NamedTuple


class Variant(NamedTuple):
    """A kernel with all of its compile-time parameters.

    pointers:  pointer arguments and their Triton types
    constants: tl.constexpr arguments
    options:   of the launch: num_warps, num_stages, ...
    floats:    fp32 arguments; all others are integers
    aligned:   integer arguments that are multiples of 16, besides strides (`*stride`, `*_b`, `*_n`, `*_t`)
    """

    kernel: str
    config: str
    function: Any
    pointers: dict[str, str]
    constants: dict[str, Any]
    options: dict[str, Any]
    floats: tuple[str, ...] = ()
    aligned: tuple[str, ...] = ()
