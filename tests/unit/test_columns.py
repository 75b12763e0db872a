"""Columns of text, against lines written out here."""

from lowband.spec.columns import aligned


def test_columns_are_as_wide_as_their_widest_cell() -> None:
    rows = [["change", "gain"], ["", "7 %"], ["zero1", ""]]
    assert aligned(rows) == ["change  gain", "        7 %", "zero1"]
    assert aligned([]) == []
