"""A stranger's version of a file: its plain data with values, keys and subtrees changed, or its bytes."""

import json
import random
from copy import deepcopy
from functools import cache
from typing import Any

import yaml

VALUES: list[Any] = [
    None, True, False, 0, 1, -1, 2**31, 2**64, 10**30, 0.5, -0.0, 1e308, float("inf"), float("nan"),
    "", " ", "x", "../../x", "; touch x #", "$(touch x)", "a\nb", "\x00", "ü" * 50, "9" * 5000, "None", "nan",
    [], [[]], {}, {"x": {}}, {"": None}, [1, "a", None], ["x"] * 1000,
]  # fmt: skip
RAW_YAML = [
    "2024-13-45", "!!bool abc", "!!int ''", "!!float abc", "!!binary x", "!!python/object:os.system [x]",
    "9" * 5000, "&a [*a]", "&a {b: *a}", "{? [a] : b}", "[" * 200 + "]" * 200, "<<: 5", "{1: 2}", "0x", "=",
    "[&a [x,x,x,x,x,x,x,x,x,x], "  # an alias bomb
    + ", ".join(f"&{b} [{','.join([f'*{a}'] * 10)}]" for a, b in zip("abcdef", "bcdefg", strict=True))
    + "]",
]  # fmt: skip
RAW_JSON = [
    "9" * 5000, "[" * 2000 + "]" * 2000, '"\\ud800"', "NaN", "-Infinity", "1e999", '{"a": 1, "a": 2}', "'x'",
]  # fmt: skip
RAW_BYTES = [b"9" * 5000, b"nan", b"-1", b"\x00", b"[[", b'"', b"1e999"]
_MARK = "raw-text-goes-here"


def mutate(text: str, kind: str, draw: random.Random) -> bytes:
    """kind: yaml | json | lines"""
    if kind == "lines" or draw.random() < 0.2:
        return _bytes(text.encode(), draw)
    raw = draw.random() < 0.2
    data = deepcopy(_plain(text, kind))
    for _ in range(draw.choice([1, 1, 1, 2, 3])):
        data = _change(data, _MARK if raw else None, draw)
    changed = (
        yaml.dump(data, Dumper=yaml.CSafeDumper, sort_keys=False) if kind == "yaml" else json.dumps(data)
    )
    if raw:
        changed = changed.replace(
            f'"{_MARK}"' if kind == "json" else _MARK, draw.choice(RAW_YAML if kind == "yaml" else RAW_JSON)
        )
    return changed.encode("utf-8", "surrogatepass")


@cache
def _plain(text: str, kind: str) -> Any:
    return yaml.safe_load(text) if kind == "yaml" else json.loads(text)


def _change(data: Any, value: Any, draw: random.Random) -> Any:
    """The data with one place changed."""
    places = list(_places(data))
    if not places:
        return deepcopy(draw.choice(VALUES)) if value is None else value
    parent, key = draw.choice(places)
    new = deepcopy(draw.choice(VALUES)) if value is None else value
    how = draw.choice(["value", "value", "value", "swap", "remove", "add", "key"])
    if how == "swap":
        other, other_key = draw.choice(places)
        new = json.loads(json.dumps(other[other_key], default=str))
    if how == "remove":
        del parent[key]
    elif how == "add" and isinstance(parent, list):
        parent.insert(draw.randrange(len(parent) + 1), new)
    elif how == "add":
        parent[draw.choice(["x", "", "name", "like", "a.b", "1"])] = new
    elif how == "key" and isinstance(parent, dict):
        parent[draw.choice(["x", "", "a\nb", "ü", "; touch x #", "../x", str(key).upper()])] = parent.pop(key)
    else:
        parent[key] = new
    return data


def _places(data: Any):
    """(parent, key) of every value."""
    for key in list(data) if isinstance(data, dict) else range(len(data)) if isinstance(data, list) else ():
        yield data, key
        yield from _places(data[key])


def _bytes(data: bytes, draw: random.Random) -> bytes:
    for _ in range(draw.choice([1, 1, 2, 5])):
        i, j = sorted(draw.randrange(len(data) + 1) for _ in range(2))
        j = min(j, i + 40)
        how = draw.randrange(5)
        if how == 0:
            data = data[:i] + bytes([draw.randrange(256)]) + data[i + 1 :]
        elif how == 1:
            data = data[:i] + data[j:]
        elif how == 2:
            data = data[:j] + data[i:j] * draw.choice([1, 3, 50]) + data[j:]
        elif how == 3:
            data = data[:i]
        else:
            data = (
                data[:i]
                + draw.choice([b"9" * 5000, b"nan", b"-1", b"\x00", b"[[", b'"', b"1e999"])
                + data[i:]
            )
    return data
