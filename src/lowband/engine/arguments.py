"""Arguments of another kind than a function takes: refused by name, before anything is changed or sent."""

from torch import nn

from lowband.errors import UserError


def check_kind(where: str, name: str, given: object, kind: type | tuple[type, ...], allowed: str) -> None:
    """Raises UserError unless `given` is of a kind."""
    if not isinstance(given, kind):
        raise refused(where, name, given, allowed)


def check_wrap(where: str, wrap: object) -> None:
    """Raises UserError unless it is a class, a tuple of classes, or a function."""
    if isinstance(wrap, tuple):
        is_right = all(isinstance(each, type) for each in wrap)
    else:
        is_right = callable(wrap) and not isinstance(wrap, nn.Module)
    if not is_right:
        raise refused(where, "wrap", wrap, "a class of modules, a tuple of them, or a function of a module")


def check_pair(where: str, name: str, given: object) -> None:
    """Raises UserError unless it is an input with its target."""
    if not isinstance(given, tuple | list) or len(given) != 2:
        raise refused(where, name, given, "(input, target)")


def check_callable(where: str, name: str, given: object, allowed: str) -> None:
    """Raises UserError unless `given` is None or can be called."""
    if given is not None and not callable(given):
        raise refused(where, name, given, allowed)


def refused(where: str, name: str, given: object, allowed: str) -> UserError:
    """One line, also of a value that prints as many."""
    shown = repr(given)
    if len(shown) > 60 or "\n" in shown:
        shown = f"of type {type(given).__name__}"
    return UserError(f"{name} is {shown}", where=where, allowed=allowed)
