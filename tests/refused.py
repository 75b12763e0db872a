"""What the library says of a call that it refuses."""

from collections.abc import Callable

import pytest

from lowband.errors import UserError


def refusal(call: Callable[..., object], *args: object, **options: object) -> str:
    """The one line of the UserError with which the call ends; fails if it ends otherwise."""
    with pytest.raises(UserError) as error:
        call(*args, **options)
    assert "\n" not in str(error.value)
    return str(error.value)


def answer(call: Callable[..., object], *args: object, **options: object) -> str:
    """The same; "" of a call that is not refused."""
    try:
        call(*args, **options)
    except UserError as error:
        assert "\n" not in str(error)
        return str(error)
    return ""
