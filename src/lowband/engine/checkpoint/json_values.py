"""Values of a caller that JSON keeps as they are, but for tuples, which come back as lists."""

import json
from typing import Any

from lowband.errors import UserError


def check_json(where: str, value: dict[str, Any]) -> None:
    """Raises UserError for what JSON cannot represent, or gives back as something else."""
    try:
        json.dumps(value)
        key = _other_key(value)
    except (TypeError, ValueError, RecursionError) as error:
        raise UserError(
            f"cannot be saved: {error}", where=where, allowed="values that JSON can represent"
        ) from None
    if key is not None:
        raise UserError(
            f"cannot be saved: the key {key!r} would come back as text", where=where, allowed="keys of text"
        )


def _other_key(value: Any) -> Any:
    """A key that is no text, anywhere in it."""
    if isinstance(value, dict):
        for key, inner in value.items():
            if not isinstance(key, str):
                return key
            if (found := _other_key(inner)) is not None:
                return found
    elif isinstance(value, list | tuple):
        return next((found for inner in value if (found := _other_key(inner)) is not None), None)
    return None
