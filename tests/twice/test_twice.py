"""That a case can be made twice, and that the comparison notices a difference."""

import json
from pathlib import Path

import pytest

from tests.twice.__main__ import contents, differing
from tests.twice.cases import CASES, COMMANDS
from tests.twice.runs import run_folder, train_cases


def test_a_run_made_twice_and_a_changed_record(tmp_path: Path) -> None:
    [case] = [case for case in CASES if case.name == "zero3 on 2 ranks"]
    one, other = (run_folder(tmp_path / attempt, case) for attempt in "12")
    for run in (one, other):
        train_cases(run.path.parent, [case.name])
    assert differing(one, other) == ""
    lines = other.steps.read_text().splitlines()
    lines[2] = json.dumps(json.loads(lines[2]) | {"grad_norm": 1.0})
    other.steps.write_text("\n".join(lines) + "\n")
    assert differing(one, other) == "step 3: grad_norm"
    outcome = json.loads(one.outcome.read_text())
    other.steps.write_text(one.steps.read_text())
    other.outcome.write_text(json.dumps(outcome | {"weights_sha256": "0"}))
    assert differing(one, other) == "final weights"


def test_every_case_is_a_spec_of_its_own() -> None:
    specs = [case.spec().to_json() for case in CASES]
    assert len(set(specs)) == len(specs) == len({case.spec().run_id for case in CASES})
    assert {case.like for case in CASES} <= {"", *(case.name for case in CASES)}


@pytest.mark.wide
def test_tables_figures_and_page_need_only_what_is_linked(tmp_path: Path) -> None:
    files = contents(COMMANDS["tables, figures, claims, page"], tmp_path, "1")
    assert {"out/page.html", "out/tables/claims.csv"} <= set(files)
