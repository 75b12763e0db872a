"""steps.jsonl as columns, for tables of millions of steps: no object is made for a step.

The numbers of a line as `RunFolder.append_step` writes it are taken as they stand there: Python prints a
float in one way, in JSON and in CSV. Lines of any other form, such as those of earlier versions, are first
read as records and written again, which raises the errors of `RunFolder.read_steps`.
"""

import re
from typing import Any

from pydantic import TypeAdapter, ValidationError

from lowband.spec.plain_data import read_text
from lowband.spec.records import Sent, Slowest, StepRecord
from lowband.spec.run_folder import RunFolder, step_line

Columns = dict[str, tuple[str, ...]]

_INT = r"-?(?:0|[1-9]\d*)"
_FLOAT = rf"{_INT}(?:\.\d+(?:e[+-]\d+)?|e[+-]\d+)|-?Infinity"
_PATTERNS: dict[Any, str] = {  # a value in a group; what is none is outside of it
    int: f"({_INT})",
    float: f"(?:({_FLOAT})|NaN)",
    int | None: f"(?:({_INT})|null)",
    float | None: f"(?:({_FLOAT})|NaN|null)",
    tuple[Sent, ...]: r"(\[.*\])",
    tuple[Slowest, ...]: r"(\[.*\])",
}
_FIELDS = [
    f'"{name}": {_PATTERNS[field.annotation]}' for name, field in StepRecord.model_fields.items()
]  # fmt: skip
_LINE = re.compile(r"^\{" + ", ".join(_FIELDS) + r"\}$", re.MULTILINE)
_SENT = TypeAdapter(tuple[Sent, ...])

NO_STEPS: Columns = dict.fromkeys(StepRecord.model_fields, ())


def read_columns(folder: RunFolder) -> Columns:
    """Field of StepRecord -> its JSON text in each step, 1 to n; empty for null and for NaN.

    Raises UserError as `RunFolder.read_steps` does.
    """
    text = read_text(folder.steps)
    columns = _columns(text)
    if not _is_sound(columns, text.count("\n") + (not text.endswith("\n"))):
        columns = _columns("".join(map(step_line, folder.read_steps())))
    return columns


def floats(column: tuple[str, ...]) -> list[float]:
    """The column's numbers, without the steps that have none."""
    return [float(text) for text in column if text]


def sent_bytes(columns: Columns) -> int | float:
    """The sum over all steps, levels and collectives. The same text, as most steps have it, is read once."""
    found = {text: sum(sent.bytes for sent in _SENT.validate_json(text)) for text in set(columns["sent"])}
    return sum(map(found.__getitem__, columns["sent"]))


def _columns(text: str) -> Columns:
    rows = _LINE.findall(text)
    return dict(zip(StepRecord.model_fields, zip(*rows, strict=True), strict=True)) if rows else NO_STEPS


def _is_sound(columns: Columns, lines: int) -> bool:
    """Whether each line is the record of the next step."""
    if list(columns["step"]) != [str(step) for step in range(1, lines + 1)]:
        return False
    try:
        for text in set(columns["sent"]):
            _SENT.validate_json(text)
    except ValidationError:
        return False
    return True
