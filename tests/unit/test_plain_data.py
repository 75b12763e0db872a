"""JSON and YAML of strangers: data, or one UserError; no other exception, no endless message or work."""

from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from lowband.errors import UserError
from lowband.spec.config import Config
from lowband.spec.csv_tables import read_table
from lowband.spec.plain_data import MOST_VALUES, parse_json, parse_yaml, read_yaml
from lowband.spec.yaml_model import Strict
from tests.refused import refusal

BOMB = "a: &a [x, x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{b}: &{b} [{', '.join([f'*{a}'] * 10)}]\n" for a, b in zip("abcdefgh", "bcdefghi", strict=True)
)
UNREADABLE = [
    "x: 2024-13-45", "x: !!bool abc", "x: !!int ''", "x: !!float abc", "x: " + "9" * 5000, "x: \x07",
    "&a [*a]", "x: &a {b: *a}", "{? [a] : b}", "!!python/object:os.system [x]", "x: " + "[" * 5000, BOMB,
    "x: 0x" + "f" * 5000, "x: 0b" + "1" * 65, "x: 1" + ":59" * 20, "0x" + "f" * 5000 + ": 1",
    "x: -" + "9" * 4000, "longest_minutes: {91: 2:00:00}",
]  # fmt: skip


class Named(Strict):
    x: int


@pytest.mark.parametrize("text", UNREADABLE, ids=range(len(UNREADABLE)))
def test_yaml_that_cannot_be_read(text: str, tmp_path: Path) -> None:
    path = tmp_path / "file.yaml"
    path.write_text(text)
    said = refusal(read_yaml, path)
    assert "file.yaml" in said
    assert len(said) < 1000


def test_what_is_no_mapping_of_names_says_so(tmp_path: Path) -> None:
    path = tmp_path / "file.yaml"
    for text, says in (
        ("- x", "file.yaml: is not a mapping of keys to values"), ("1: x", "file.yaml: key 1 is not text"),
        ("x: 1\ny: &a [*a]", "file.yaml:2: a value contains itself"),
    ):  # fmt: skip
        path.write_text(text)
        assert says in refusal(read_yaml, path)


@pytest.mark.parametrize("text", ["", "a,b\n1,2,3\n4,5,6,7\n", 'a\n"', "a,b\n1\n2,3,4\n"])
def test_a_file_that_is_no_table(text: str, tmp_path: Path) -> None:
    (tmp_path / "runs.csv").write_text(text)
    assert "runs.csv: no such table: " in refusal(read_table, tmp_path / "runs.csv")


@pytest.mark.parametrize(
    "text", ["[" * 5000 + "]" * 5000, "9" * 5000, "9" * 4000, str(2**64), '"\\ud800"', "{", ""], ids=range(7)
)
def test_json_that_cannot_be_read(text: str) -> None:
    with pytest.raises(UserError, match=r"^file.*JSON"):
        parse_json(text, "file")


@settings(max_examples=50)
@given(
    st.recursive(
        st.none() | st.booleans() | st.integers(1 - 2**64, 2**64 - 1) | st.text(),
        lambda x: st.lists(x) | st.dictionaries(st.text(), x),
    )
)
def test_plain_values_come_back(value: object) -> None:
    assert parse_yaml(yaml.safe_dump(value), "file") == value


@pytest.mark.parametrize("number", ["inf", "-inf", "nan"])
def test_a_number_is_finite(number: str) -> None:
    class Rate(Strict):
        x: float

    with pytest.raises(UserError, match=r"^file: x: Input should be a finite number"):
        Rate.parse({"x": float(number)}, "file")


@pytest.mark.parametrize("text", ["a: 1\nb: {c: 1,\n  c: 2}\n", "a: 1\na: 2\n"])
def test_a_key_is_given_once(text: str) -> None:
    """PyYAML keeps the last in silence: of two schemes of one name one would be lost."""
    with pytest.raises(UserError, match=r"^here:\d: key '[ac]' is given twice \(allowed: once\)$"):
        parse_yaml(text, "here")


def test_aliases_are_read_up_to_the_limit() -> None:
    tens = "&a [1, 1, 1, 1, 1, 1, 1, 1, 1, 1]"
    assert parse_yaml(f"[{tens}, *a, {{b: *a}}]", "file") == [[1] * 10, [1] * 10, {"b": [1] * 10}]
    assert len(parse_yaml("[" + "1," * 1000 + "]", "file")) == 1000 < MOST_VALUES


def test_a_message_is_one_printable_line_of_bounded_length() -> None:
    assert len(refusal(Named.parse, {"x": "a\nb" * 100_000}, "file")) < 4000
    error = UserError("a\nb\x1b[31m" * 10_000, where="file", allowed=["c\n"] * 10_000)
    assert str(error).isprintable()
    assert len(str(error)) < 5000


def test_more_runs_than_anyone_can_make_are_refused(tmp_path: Path) -> None:
    folder = tmp_path / "config" / "suites"
    folder.mkdir(parents=True)
    suite = "purpose: x\ncluster: local\nfixed: {model: gpt-5m, scheme: zero3, ranks: 2, micro_batch: 1}\n"
    (folder / "long.yaml").write_text(f"{suite}repeats: 3000000000\n")
    with pytest.raises(UserError, match=r"long\.yaml: repeats"):
        Config(tmp_path).runs(["long"])
    axes = "\n".join(
        f"  {key}: [{', '.join(map(str, range(1, 100)))}]" for key in ("seed", "steps", "seq_len")
    )
    (folder / "wide.yaml").write_text(f"{suite}axes:\n{axes}\n")
    with pytest.raises(UserError, match=r"wide.yaml: axes and repeats make 970,299 runs \(allowed: at most"):
        Config(tmp_path).runs(["wide"])


@pytest.mark.parametrize("like", ["{a: 1}", ".nan", "[x]", "../../x", "''"])
def test_like_is_a_name(like: str, tmp_path: Path) -> None:
    folder = tmp_path / "slurm" / "mine"
    folder.mkdir(parents=True)
    (folder / "machine.yaml").write_text(f"like: {like}\n")
    with pytest.raises(UserError, match=r"machine\.yaml: like: .* is not a cluster's name"):
        Config(tmp_path).machine("mine")


@pytest.mark.parametrize("suites", ["null", "5", "smoke", "[1]"])
def test_suites_is_a_list_of_names(suites: str, tmp_path: Path) -> None:
    (tmp_path / "config").mkdir()
    (tmp_path / "config" / "config.yaml").write_text(f"suites: {suites}\n")
    with pytest.raises(UserError, match=r"config\.yaml: suites is not a list of names"):
        _ = Config(tmp_path).default_suites


@pytest.mark.parametrize("name", ["9" * 5000, "../escaped", "; touch x #", "", "a/b", "a\nb"])
def test_a_name_that_no_file_can_have_is_unknown(name: str, tmp_path: Path) -> None:
    config = Config(tmp_path)
    for ask in (
        config.machine, config.suite, config.scheme, config.model,
        lambda name: config.stack_on(name, "frontier"),
    ):  # fmt: skip
        with pytest.raises(UserError, match=r"no (cluster|suite|stack|entry) '"):
            ask(name)
