"""JSON and YAML text -> plain data of bounded size. A stranger's file raises UserError, and nothing else."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from lowband.errors import UserError

MOST_VALUES = 1_000_000  # of a YAML file, each counted as often as aliases repeat it
MOST_BITS = 64  # of an integer: Python has no limit, but its floats and its own printing of integers do
# What the readers raise beside their own errors: for an impossible date, a number of 5,000 digits, ...
_UNREADABLE = (ValueError, KeyError, IndexError, TypeError, AttributeError, OverflowError)


def _bounded(value: int) -> int:
    """The integer. Raises ValueError for one of more than MOST_BITS."""
    if value.bit_length() > MOST_BITS:
        raise ValueError(f"an integer has more than {MOST_BITS} bits")
    return value


# libyaml, where PyYAML was built with it, is far faster: Snakemake reads all of config/ three times a job.
class _Loader(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]
    """PyYAML's loader of plain values, with integers of bounded size, none of them to base 60."""

    def construct_yaml_int(self, node: yaml.ScalarNode) -> int:
        if ":" in node.value:  # a time limit of 2:00:00 would be 7200
            raise ValueError(f"{node.value} would be a number to base 60: quote it if it is text")
        return _bounded(super().construct_yaml_int(node))


_Loader.add_constructor("tag:yaml.org,2002:int", _Loader.construct_yaml_int)


def read_text(path: Path) -> str:
    """The file's text. Raises UserError if it cannot be read."""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise _unreadable(path, error) from None


def read_lines(path: Path, errors: str = "strict") -> Iterator[str]:
    """Its lines, one at a time, without their ends. Raises UserError as `read_text` does.

    errors: of bytes that are not UTF-8, as of `open`
    """
    try:
        with path.open(encoding="utf-8", errors=errors) as file:
            for line in file:
                yield line.rstrip("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise _unreadable(path, error) from None


def _unreadable(path: Path, error: OSError | UnicodeDecodeError) -> UserError:
    if isinstance(error, OSError):
        return UserError(f"cannot be read: {error.strerror}", where=path)
    return UserError("is not valid UTF-8", where=path)


def parse_json(text: str, where: str | Path) -> Any:
    """The value of a JSON text. Raises UserError, also for characters that no file can hold."""
    try:
        value = json.loads(text, parse_int=lambda digits: _bounded(int(digits)))
        if "\\ud" in text.lower():  # half of a surrogate pair
            json.dumps(value, ensure_ascii=False).encode("utf-8")
    except json.JSONDecodeError as error:
        raise UserError(f"is not JSON: {error.msg}", where=f"{where}:{error.lineno}") from None
    except RecursionError:
        raise UserError("is not JSON that can be read: too deeply nested", where=where) from None
    except ValueError as error:
        raise UserError(f"is not JSON that can be read: {error}", where=where) from None
    return value


def parse_yaml(text: str, where: str | Path) -> Any:
    """The value of a YAML text, of which only plain values are read."""
    loader = None
    try:
        loader = _Loader(text)
        node = loader.get_single_node()
        if node is None:
            return None
        _check_nodes(node, where)
        return loader.construct_document(node)
    except yaml.YAMLError as error:
        line = getattr(getattr(error, "problem_mark", None), "line", None)
        place = f"{where}:{line + 1}" if line is not None else str(where)
        raise UserError(f"is not YAML: {getattr(error, 'problem', None) or error}", where=place) from None
    except RecursionError:
        raise UserError("is not YAML that can be read: too deeply nested", where=where) from None
    except _UNREADABLE as error:
        raise UserError(f"is not YAML that can be read: {error}", where=where) from None
    finally:
        if loader is not None:
            loader.dispose()


def read_yaml(path: Path) -> dict[str, Any]:
    """The file's mapping. Raises UserError if it is missing, is not YAML or is not a mapping of names."""
    data = parse_yaml(read_text(path), path)
    if not isinstance(data, dict):
        raise UserError("is not a mapping of keys to values", where=path)
    for key in data:
        if not isinstance(key, str):
            raise UserError(f"key {key!r} is not text", where=path)
    return data


def _check_nodes(root: yaml.Node, where: str | Path) -> None:
    """Raises UserError for a value that contains itself, equal keys, and more values than MOST_VALUES."""
    sizes: dict[int, int] = {}  # by id, of the nodes whose parts are all counted
    around: set[int] = set()  # ids of the nodes that the present one is part of
    ahead: list[tuple[yaml.Node, bool]] = [(root, False)]
    while ahead:
        node, is_counted = ahead.pop()
        if is_counted:
            around.discard(id(node))
            sizes[id(node)] = 1 + sum(sizes[id(part)] for part in _parts(node))
            if sizes[id(node)] > MOST_VALUES:
                raise UserError(f"has more than {MOST_VALUES:,} values, aliases counted", where=where)
        elif id(node) in around:
            raise UserError("a value contains itself", where=f"{where}:{node.start_mark.line + 1}")
        elif id(node) not in sizes:
            around.add(id(node))
            _check_keys(node, where)
            ahead += [(node, True), *((part, False) for part in _parts(node))]


def _check_keys(node: yaml.Node, where: str | Path) -> None:
    """YAML forbids equal keys; PyYAML would keep the last in silence."""
    if not isinstance(node, yaml.MappingNode):
        return
    seen: set[tuple[str, str]] = set()
    for key, _ in node.value:
        if isinstance(key, yaml.ScalarNode):
            if (key.tag, key.value) in seen:
                line = key.start_mark.line + 1
                raise UserError(f"key '{key.value}' is given twice", where=f"{where}:{line}", allowed="once")
            seen.add((key.tag, key.value))


def _parts(node: yaml.Node) -> list[yaml.Node]:
    if isinstance(node, yaml.MappingNode):
        return [part for pair in node.value for part in pair]
    return node.value if isinstance(node, yaml.SequenceNode) else []
