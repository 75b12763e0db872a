"""Strict data classes: an unknown key is an error that names the file, the key and the allowed keys."""

import json
import reprlib
from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self, TypeVar

from pydantic import BaseModel, ConfigDict, SerializerFunctionWrapHandler, ValidationError, model_serializer

from lowband.errors import UserError
from lowband.spec.plain_data import parse_json, read_text, read_yaml


class Strict(BaseModel):
    """Immutable, keyword-only, unknown keys rejected, numbers finite. Base of everything read from a file."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    if not TYPE_CHECKING:  # which knows the arguments from the fields

        def __init__(self, **values: Any) -> None:
            """Raises UserError naming the class and the key at fault."""
            try:
                super().__init__(**values)
            except ValidationError as error:
                raise _as_user_error(error, type(self).__name__, type(self)) from None

        # Not pydantic's way to validate what is read: that names the place.
        __init__.__pydantic_base_init__ = True

    @classmethod
    def parse(cls, data: object, where: str | Path) -> Self:
        """Build from plain data. Raises UserError naming `where` and the key at fault."""
        try:
            return cls.model_validate(data)
        except ValidationError as error:
            raise _as_user_error(error, where, cls) from None

    @classmethod
    def read_json(cls, path: Path) -> Self:
        """The file's object. Raises UserError if it is missing, is not JSON or does not fit the class."""
        return cls.parse(parse_json(read_text(path), path), path)

    def to_json(self) -> str:
        return json.dumps(self.model_dump(mode="json"), indent=2) + "\n"


class Younger(Strict):
    """One whose younger keys are left out of its file at their default: checksums of what has none stay."""

    younger: ClassVar[tuple[str, ...]] = ()

    @classmethod
    def left_out(cls) -> Collection[str]:
        return cls.younger

    @model_serializer(mode="wrap")
    def _without_defaults(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        values: dict[str, Any] = handler(self)
        fields, left_out = type(self).model_fields, self.left_out()
        return {k: v for k, v in values.items() if k not in left_out or getattr(self, k) != fields[k].default}


T = TypeVar("T", bound=Strict)


def read_entries(cls: type[Strict], path: Path, key: str) -> dict[str, Any]:
    """All entries of a YAML mapping of entries, in their order, as `cls` with the name under `key`."""
    return {
        name: parse_entry(cls, entry, f"{path}: {name}", **{key: name})
        for name, entry in read_yaml(path).items()
    }


def parse_entry(cls: type[T], entry: object, where: str, **name: str) -> T:
    """An entry of a mapping of entries as `cls`. name: the entry's name, under the field that holds it"""
    if not isinstance(entry, dict):
        raise UserError("is not a mapping of keys to values", where=where)
    return cls.parse({**name, **entry}, where)


def _as_user_error(error: ValidationError, where: str | Path, model: type[BaseModel]) -> UserError:
    """The first error as one line: the key, what is wrong, and the allowed keys.

    An unknown key comes first: it is often a misspelling of the one that is missing.
    """
    first = min(error.errors(), key=lambda finding: finding["type"] != "extra_forbidden")
    key = ".".join(map(str, first["loc"]))
    message = first["msg"].removeprefix("Value error, ")
    if first["type"] == "extra_forbidden":
        return UserError(f"unknown key '{key}'", where=where, allowed=_keys(model, first["loc"][:-1]))
    if first["type"] == "missing":
        return UserError(f"key '{key}' is missing", where=where)
    if not key:
        return UserError(message, where=where)
    return UserError(f"{key}: {message}, not {reprlib.repr(first['input'])}", where=where)


def _keys(model: type[BaseModel], path: tuple[int | str, ...]) -> list[str]:
    """The keys allowed at `path` inside `model`."""
    for step in path:
        annotation = model.model_fields[step].annotation if step in model.model_fields else None
        inner = [a for a in (annotation, *getattr(annotation, "__args__", ())) if isinstance(a, type)]
        models = [a for a in inner if issubclass(a, BaseModel)]
        model = models[0] if models else model
    return sorted(model.model_fields)
