"""Steps as columns of text against the same steps as records."""

import json
import math
from pathlib import Path

import pytest

from lowband.errors import UserError
from lowband.spec.records import Sent, StepRecord
from lowband.spec.run_folder import RunFolder
from lowband.spec.step_columns import floats, read_columns, sent_bytes

FLOATS = [
    0.1,
    5e-324,
    1.7976931348623157e308,
    1e-05,
    1e16,
    -2.5,
    123456789.125,
    math.nan,
    math.inf,
    -math.inf,
]


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    return RunFolder(tmp_path)


def record(step: int, value: float, **changes: object) -> StepRecord:
    own = Sent(level="node]", collective='a "name" {[', wire="fp32", bytes=step % 2 * 1.5)
    values = {
        "step": step, "step_time_s": value, "compute_time_s": None if step % 2 else value,
        "exposed_comm_time_s": None, "hidden_comm_time_s": 1.0, "tokens": 64, "loss": value, "grad_norm": 2.0,
        "sent": (own, own), **changes,
    }  # fmt: skip
    return StepRecord.model_validate(values)


def test_columns_are_the_records_fields(folder: RunFolder) -> None:
    records = [record(step, value) for step, value in enumerate(FLOATS, start=1)]
    for each in records:
        folder.append_step(each)
    columns = read_columns(folder)
    assert list(columns) == list(StepRecord.model_fields)
    for name in set(columns) - {"sent", "slowest"}:
        should = [getattr(each, name) for each in records]
        numbers = [value for value in should if value is not None and not math.isnan(value)]
        assert [text for text in columns[name] if text] == [json.dumps(value) for value in numbers]
        assert [not text for text in columns[name]] == [value not in numbers for value in should]
        assert floats(columns[name]) == numbers
    assert sent_bytes(columns) == sum(sent.bytes for each in records for sent in each.sent)


def test_other_forms_of_a_line_are_the_same_record(folder: RunFolder) -> None:
    """An int where a float is meant, other spaces, another order, no value where there is a default."""
    line = json.loads(json.dumps(record(1, 5.0).model_dump(mode="json")))
    other = {key: line[key] for key in reversed(line) if line[key] is not None or key != "real_share"}
    folder.steps.write_text(json.dumps({**other, "loss": 5}, separators=(",", ":")))
    columns = read_columns(folder)
    assert (columns["loss"], columns["real_share"], columns["step"]) == (("5.0",), ("",), ("1",))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{}\n", "jsonl:1: is not a step record"),
        ("nonsense\n", "jsonl:1: is not a step record"),
        ('{"step": 1', "jsonl:1: is not a step record"),
    ],
)
def test_damage_is_refused_as_by_the_reader_of_records(folder: RunFolder, text: str, message: str) -> None:
    folder.steps.write_text(text)
    with pytest.raises(UserError, match=message):
        read_columns(folder)


def test_damage_among_the_bytes_sent_is_refused(folder: RunFolder) -> None:
    folder.append_step(record(1, 1.0))
    folder.append_step(record(2, 1.0))
    folder.steps.write_text(folder.steps.read_text().replace('"bytes": 0.0', '"bytes": "many"'))
    with pytest.raises(UserError, match="jsonl:2: is not a step record"):
        read_columns(folder)


def test_no_steps(folder: RunFolder) -> None:
    folder.steps.write_text("")
    assert set(read_columns(folder).values()) == {()}
