"""Tables of made-up runs, built once."""

from pathlib import Path

import pytest
from report_runs import smoke_specs, write_run

from lowband.report.build_tables import SUITE_OF, TABLES, write_table
from lowband.report.collect import collect
from lowband.validation.tables import write_predicted

ROOT = Path(__file__).parents[2]
REFERENCE = ROOT / "results" / "reference"


@pytest.fixture(scope="session")
def tables(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The smoke suite, all ok: 1 s a step on 1 rank, 0.5 s on 4, 0.4 s on 8; shipped suites as shipped."""
    folder = tmp_path_factory.mktemp("tables")
    step_time_s = {1: 1.0, 4: 0.5, 8: 0.4}
    runs = [
        write_run(folder / "runs", spec, step_time_s[spec.ranks], loss=5 + spec.ranks * 2.0**-20)
        for spec in smoke_specs()
    ]
    collect(runs, folder)
    write_predicted(ROOT, folder)
    for name in TABLES:
        shipped = REFERENCE / SUITE_OF[name] if name in SUITE_OF else folder
        write_table(name, shipped, folder)
    return folder
