"""Rows of a campaign that was cut are kept, in the order of their seeds, and each says its commit."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import campaign_rows
from tests.campaign_rows import Rows, read

COLUMNS = ("part", "seed", "wrong", "commit")


@pytest.mark.parametrize(("key", "order"), [(("seed",), "2 10 11"), (("part", "seed"), "10 2 11")])
def test_what_was_cut_goes_on(
    key: tuple[str, ...], order: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "out" / "rows.csv"
    for code, seeds in (("one", [10, 2]), ("two", [10, 2, 11])):
        monkeypatch.setattr(campaign_rows, "commit", lambda code=code: code)
        rows = Rows(path, COLUMNS, key)
        for seed in seeds:
            row = {"part": "a", "seed": seed}
            if not rows.has(*(row[name] for name in key)):
                rows.add(row)
    assert " ".join(row["seed"] for row in read(path)) == order
    assert {row["seed"]: row["commit"] for row in read(path)} == {"10": "one", "2": "one", "11": "two"}
    assert [*map(str, (row["seed"] for row in rows))] == order.split()


def test_without_a_file_they_are_only_held() -> None:
    rows = Rows(None, COLUMNS)
    assert rows.add({"seed": 3, "wrong": ""})["commit"]
    assert rows.has(3) and not rows.has(4)


def test_a_table_whose_writing_is_cut_is_as_before(tmp_path: Path) -> None:
    def rows() -> Iterator[campaign_rows.Row]:
        yield {"seed": 2}
        raise KeyboardInterrupt

    path = tmp_path / "rows.csv"
    campaign_rows.write(path, ("seed",), [{"seed": 1}])
    with pytest.raises(KeyboardInterrupt):
        campaign_rows.write(path, ("seed",), rows())
    assert read(path) == [{"seed": "1"}]
