"""Parts of documents: how rows become cells and lines. That documents are true: test_benchmarks.py."""

from pathlib import Path

import pandas as pd
import pytest

from lowband.errors import UserError
from lowband.evidence.report import documents
from lowband.evidence.report.documents import Part, read_blocks, write_documents
from lowband.predict.search.candidates import WIRES
from tests.checkout import ROOT

ROWS = pd.DataFrame(
    {
        "peer": ["fsdp2", "ours"],
        "time_s": [1.25, None],
        "is_right": [True, False],
        "why": [None, "too late | lost"],
    }
)


def cells(**keys: object) -> list[str]:
    return list(Part.parse({"table": "t", **keys}, "test").frame(ROWS).iloc[:, 0])


def test_the_first_format_without_an_empty_column_is_taken() -> None:
    assert cells(show={"a": ["{time_s:.1f} s: {why}", "{time_s:.1f} s", "none: {why}"]}) == [
        "1.2 s", "none: too late | lost",
    ]  # fmt: skip
    assert cells(show={"a": "{time_s:.1f}"}) == ["1.2", "nan"]


def test_words_for_what_is_true_and_for_values() -> None:
    assert cells(show={"a": "{is_right:yes|}"}) == ["yes", ""]
    assert cells(show={"a": "{peer}"}, words={"peer": "peers"}) == ["FSDP2", "ours"]
    assert cells(show={"a": "{peer}"}, words={"peer": {"ours": "lowband"}}) == ["fsdp2", "lowband"]


def test_a_part_without_rows_is_left_out(tmp_path: Path) -> None:
    (tmp_path / "config").mkdir()
    ROWS.to_csv(tmp_path / "t.csv", index=False)
    (tmp_path / "config" / "documents.yaml").write_text(
        "d.md: {one:\n"
        "  {table: t, where: time_s > 9, before: 'Slow:', line: '- {peer}',\n"
        "   more: [{table: t, where: not is_right, before: 'Wrong:', line: '- {peer}'},\n"
        "          {table: t, show: {peer, why: ['{why}', '']}}]}}\n"
    )
    assert read_blocks(tmp_path)["one"].all_lines(tmp_path, tmp_path) == [
        "Wrong:", "", "- ours", "", "| peer | why |", "| --- | --- |", "| fsdp2 |  |",
        "| ours | too late \\| lost |",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("entry", "words"),
    [
        ("{table: t}", "has show, line or code"),
        ("{code: nope}", "no code 'nope' .allowed: counterparts"),
        ("{table: t, show: {a: '{nope}'}}", "t.csv: cannot be used: KeyError: 'nope'"),
        ("{table: t, where: time_s >, line: a}", "t.csv: cannot be used: SyntaxError"),
        ("{table: t, where: nope > 1, line: a}", "cannot be used: UndefinedVariableError"),
        ("a table", "one: is not a mapping"),
        ("{table: u, line: a}", "u.csv: no such table"),
    ],
)
def test_an_entry_that_does_not_fit_is_one_line(tmp_path: Path, entry: str, words: str) -> None:
    (tmp_path / "config").mkdir()
    (tmp_path / "config" / "documents.yaml").write_text(f"d.md: {{one: {entry}}}\n")
    ROWS.to_csv(tmp_path / "t.csv", index=False)
    with pytest.raises(UserError, match=words) as error:
        read_blocks(tmp_path)["one"].all_lines(tmp_path, tmp_path)
    assert "\n" not in str(error.value)


def test_the_table_of_placements_names_every_wire() -> None:
    added = " ".join(read_blocks(ROOT)["pareto"].add.values())
    assert all(wire in added for wire in WIRES)


def test_a_document_without_its_block_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(documents, "write_shipped_tables", lambda root, out: None)
    (tmp_path / "config").mkdir()
    (tmp_path / "config" / "documents.yaml").write_text("d.md: {one: {code: counterparts}}\n")
    (tmp_path / "d.md").write_text("no block\n")
    with pytest.raises(UserError, match=r"d.md: no block 'one' .allowed: <!-- one:begin"):
        write_documents(tmp_path)
    (tmp_path / "d.md").write_text("above\n<!-- one:begin -->\nold\n<!-- one:end -->\nbelow\n")
    write_documents(tmp_path)
    first, begin, heading, *_, end, last = (tmp_path / "d.md").read_text().splitlines()
    assert (first, begin, end, last) == ("above", "<!-- one:begin -->", "<!-- one:end -->", "below")
    assert heading.startswith("| placement | DDP |")
