"""What holds of each figure's files, whatever it was drawn from."""

import hashlib
import json
import re
from pathlib import Path

import pytest

from lowband.evidence.report.figures import FIGURES
from lowband.evidence.report.figures.style import ONE_COLUMN, TWO_COLUMNS
from lowband.spec.csv_tables import read_table


def check_print(folder: Path, name: str) -> None:
    pdf = (folder / f"{name}.pdf").read_bytes()
    assert b"/Type3" not in pdf, name  # fonts that publishers refuse
    assert pdf.count(b"/FontFile2") > 0, name  # fonts are in the file
    assert b"/CreationDate" not in pdf, name


def check_width(folder: Path, name: str) -> None:
    [points] = re.findall(r'<svg[^>]* width="([\d.]+)pt"', (folder / f"{name}.svg").read_text())
    assert float(points) / 72 in (pytest.approx(ONE_COLUMN), pytest.approx(TWO_COLUMNS)), name


def check_origin(folder: Path, name: str, tables: Path) -> None:
    origin = json.loads((folder / f"{name}.json").read_text())
    table = tables / f"{FIGURES[name].table}.csv"
    assert origin["table_sha256"] == hashlib.sha256(table.read_bytes()).hexdigest(), name
    assert f"figure {name}" in origin["command"]
    assert origin["commit"], name
    shown, source = read_table(folder / f"{name}.csv"), read_table(table)
    assert 0 < len(shown) <= len(source), name
    assert set(shown) <= set(source), name
