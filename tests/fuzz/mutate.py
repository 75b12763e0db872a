"""A stranger's version of a file: its plain data with values, keys and subtrees changed, or its bytes."""

import csv
import io
import json
import random
from copy import deepcopy
from functools import lru_cache
from itertools import islice
from typing import Any

import yaml

VALUES: list[Any] = [
    None, True, False, 0, 1, -1, 2**31, 2**53 + 1, 2**64, 10**30, 10**400, 0.5, -0.0, 5e-324, 1e308,
    float("inf"), float("nan"), "", " ", "x", "../../x", "; touch x #", "$(touch x)", "a\nb", "\x00",
    "a\x00b", "ü" * 50, "²", "\ufeff", "\u2028", "9" * 5000, "None", "nan", "1e400", "1_0", "0x1",
    [], [[]], {}, {"x": {}}, {"": None}, [1, "a", None], ["x"] * 1000, [0] * 7, {"1": 1},
]  # fmt: skip
RAW_YAML = [
    "2024-13-45", "2024-01-01", "2001-12-14t21:59:43.10-05:00", "!!bool abc", "!!int ''", "!!float abc",
    "!!binary x", "!!binary aGk=", "!!set {a, b}", "!!omap [a: 1]", "!!pairs [a: 1]", "!!null x", "! x",
    "!!python/object:os.system [x]", "9" * 5000, "0x" + "f" * 5000, "0b" + "1" * 20000, "1" + ":59" * 4000,
    "1e400", "-.inf", ".nan", "&a [*a]", "&a {b: *a}", "*a", "{? [a] : b}", "{0x" + "f" * 5000 + ": 1}",
    "{2024-01-01: 1}", "{.nan: 1}", "{null: 1}", "[" * 200 + "]" * 200, "{a: " * 200 + "1" + "}" * 200,
    "<<: 5", "{<<: [{a: 1}, {b: 2}]}", "{<<: 5}", "{a: 1, a: 2}", "{1: 2}", "0x", "=", "|\n  x",
    '"\\ud800"', "%x", "--- 1",
    "[&a [x,x,x,x,x,x,x,x,x,x], "  # an alias bomb
    + ", ".join(f"&{b} [{','.join([f'*{a}'] * 10)}]" for a, b in zip("abcdef", "bcdefg", strict=True))
    + "]",
]  # fmt: skip
RAW_JSON = [
    "9" * 5000, "9" * 4000, "[" * 2000 + "]" * 2000, '{"a":' * 500 + "1" + "}" * 500, '"\\ud800"',
    '"\\udc00x"', "NaN",
    "-Infinity", "1e999", "-1e999", '{"a": 1, "a": 2}', "'x'", '"\\u0000"', "-0", "1E400",
]  # fmt: skip
RAW_BYTES = [
    b"9" * 5000, b"nan", b"-1", b"\x00", b"[[", b'"', b"1e999", b"inf", b"\xff", b"\xef\xbb\xbf",
    b"\xed\xa0\x80",
    b"\r", b"\x0c", b"\xc2\x85", b"\xc2\xb2", b"\xe2\x80\xa8", b",", b"|", b"x" * 20000,
]  # fmt: skip
KEYS = ["x", "", "a\nb", "ü", "; touch x #", "../x", "a\x00b", "9" * 300]
MOST_PLACES = 10_000  # aliases of aliases have no end of them
_MARK = "raw-text-goes-here"
_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


def mutate(text: str, kind: str, draw: random.Random) -> bytes:
    """The text with one to three changes; of its bytes where it is not readable as its kind.

    kind: yaml | json | lines | csv | words (a JSON list of a command line's words)
    """
    if kind == "lines" or draw.random() < 0.2:
        return _bytes(text.encode("utf-8", "surrogatepass"), draw)
    if kind == "csv":
        return _csv(text, draw)
    raw = kind != "words" and draw.random() < 0.2
    try:
        data = deepcopy(_plain(text, kind))
        for _ in range(draw.choice([1, 1, 1, 2, 3])):
            data = _words(data, draw) if kind == "words" else _change(data, _MARK if raw else None, draw)
    except (ValueError, KeyError, IndexError, TypeError, AttributeError, RecursionError, yaml.YAMLError):
        return _bytes(text.encode("utf-8", "surrogatepass"), draw)
    try:
        changed = (
            yaml.dump(data, Dumper=yaml.CSafeDumper, sort_keys=False) if kind == "yaml" else json.dumps(data)
        )
    except (
        ValueError,
        RecursionError,
        yaml.YAMLError,
    ):  # what was read cannot be written: a number of 5,000 digits
        return _bytes(text.encode("utf-8", "surrogatepass"), draw)
    if raw:
        changed = changed.replace(
            f'"{_MARK}"' if kind == "json" else _MARK, draw.choice(RAW_YAML if kind == "yaml" else RAW_JSON)
        )
    return changed.encode("utf-8", "surrogatepass")


@lru_cache(maxsize=64)
def _plain(text: str, kind: str) -> Any:
    return yaml.load(text, Loader=_LOADER) if kind == "yaml" else json.loads(text)


def _change(data: Any, value: Any, draw: random.Random) -> Any:
    """The data with one place changed."""
    places = list(islice(_places(data), MOST_PLACES))
    if not places:
        return deepcopy(draw.choice(VALUES)) if value is None else value
    parent, key = draw.choice(places)
    new = deepcopy(draw.choice(VALUES)) if value is None else value
    how = draw.choice(["value", "value", "value", "near", "swap", "remove", "add", "key"])
    if how == "near" and value is None:
        new = _near(parent[key], draw)
    if how == "swap":
        other, other_key = draw.choice(places)
        new = deepcopy(other[other_key])
    if how == "remove":
        del parent[key]
    elif how == "add" and isinstance(parent, list):
        parent.insert(draw.randrange(len(parent) + 1), new)
    elif how == "add":
        parent[draw.choice(["x", "", "name", "like", "a.b", "1"])] = new
    elif how == "key" and isinstance(parent, dict):
        parent[draw.choice([*KEYS, str(key).upper()])] = parent.pop(key)
    else:
        parent[key] = new
    return data


def _near(value: Any, draw: random.Random) -> Any:
    """A value of the same kind, which a check of kinds lets pass."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return draw.choice(
            [value + 1, value - 1, -value, 2 * value, value * 10**12, value * 10**300, 0, 1, 3, 7]
        )
    if isinstance(value, float):
        return draw.choice([-value, value * 1e-300, value * 1e300, 1e-320, value / 3, 1.0])
    if isinstance(value, str):
        return draw.choice([value + "x", value[:-1], value * 50, value.upper(), value + "\n", value[::-1]])
    if isinstance(value, list):
        return draw.choice([value * 2, value[:1], value[::-1], []])
    return value


def _places(data: Any):
    """(parent, key) of every value."""
    for key in list(data) if isinstance(data, dict) else range(len(data)) if isinstance(data, list) else ():
        yield data, key
        yield from _places(data[key])


def _words(words: Any, draw: random.Random) -> Any:
    """A command line with one word changed, added or removed."""
    from tests.fuzz.arguments import WORDS  # which builds the command line's parser

    if not isinstance(words, list) or not words:
        return [draw.choice(WORDS)]
    at = draw.randrange(len(words))
    other = draw.choice([*WORDS, *(str(value) for value in VALUES if isinstance(value, str | float | bool))])
    how = draw.randrange(6)
    if how == 0:
        return words[:at] + words[at + 1 :]
    if how == 1:
        return [*words[:at], other, *words[at:]]
    if how == 2:
        return [*words, *words[at : at + 2]]
    if how == 3:
        return [*words[:at], str(_near(words[at], draw)), *words[at + 1 :]]
    return [*words[:at], other, *words[at + 1 :]]


def _csv(text: str, draw: random.Random) -> bytes:
    """A table with a cell, a row or a column changed."""
    try:
        rows = list(csv.reader(io.StringIO(text)))
    except csv.Error:
        rows = []
    if not rows:
        return _bytes(text.encode("utf-8", "surrogatepass"), draw)
    for _ in range(draw.choice([1, 1, 2, 4])):
        at = draw.randrange(len(rows))
        column = draw.randrange(max(1, len(rows[at])))
        how = draw.choice(["cell", "cell", "cell", "column", "drop", "twice", "header", "swap", "short"])
        if how == "column":
            rows = [row[:column] + row[column + 1 :] for row in rows]
        elif how == "drop" and len(rows) > 1:
            del rows[at]
        elif how == "twice":
            rows.append(list(rows[at]))
        elif how == "short":
            rows[at] = rows[at][:column]
        elif how == "swap":
            other = rows[draw.randrange(len(rows))]
            rows[at][column : column + 1] = other[column : column + 1]
        else:
            row = rows[0] if how == "header" else rows[at]
            row[column : column + 1] = [str(draw.choice([*VALUES[:36], "inf", "-inf", "1.5", "ok", "True"]))
                                        if draw.random() < 0.9 else "9" * 4000]  # fmt: skip
    changed = io.StringIO()
    try:
        csv.writer(changed, lineterminator="\n").writerows(rows)
    except csv.Error:
        return _bytes(text.encode("utf-8", "surrogatepass"), draw)
    return changed.getvalue().encode("utf-8", "surrogatepass")


def _bytes(data: bytes, draw: random.Random) -> bytes:
    for _ in range(draw.choice([1, 1, 2, 5])):
        i, j = sorted(draw.randrange(len(data) + 1) for _ in range(2))
        j = min(j, i + 40)
        how = draw.randrange(6)
        if how == 0:
            data = data[:i] + bytes([draw.randrange(256)]) + data[i + 1 :]
        elif how == 1:
            data = data[:i] + data[j:]
        elif how == 2:
            data = data[:j] + data[i:j] * draw.choice([1, 3, 50]) + data[j:]
        elif how == 3:
            data = data[:i]
        else:
            data = data[:i] + draw.choice(RAW_BYTES) + data[i if how == 4 else j :]
    return data
