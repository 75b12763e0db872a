"""Tables of made-up runs, built once."""

import fcntl
import os
import shutil
from pathlib import Path

import pytest
from hypothesis import settings
from report_runs import predictions_as_shipped, smoke_specs, write_run

from lowband.evidence.report.claim_views import write_claims
from lowband.evidence.tables.build import SUITE_OF, write_table
from lowband.evidence.tables.collect import collect
from lowband.evidence.tables.entries import COLLECTED, TABLES
from tests.checkout import CONFIG, REFERENCE, ROOT

# No example fails because the machine is busy.
settings.register_profile("unit", deadline=None)
settings.load_profile("unit")

# Tables of the runs alone; the others are made of shipped measurements or of predictions.
OF_RUNS = [
    name
    for name, table in TABLES.items()
    if name not in SUITE_OF and {*table.sources} <= {*COLLECTED, *TABLES}
]


@pytest.fixture(scope="session")
def tables(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The smoke suite, all ok: 1 s a step on 1 rank, 0.5 s on 4, 0.4 s on 8. Tables of its runs."""
    folder = tmp_path_factory.mktemp("tables")
    step_time_s = {1: 1.0, 4: 0.5, 8: 0.4}
    runs = [
        write_run(folder / "runs", spec, step_time_s[spec.ranks], loss=5 + spec.ranks * 2.0**-20)
        for spec in smoke_specs()
    ]
    collect(runs, folder)
    for name in OF_RUNS:
        write_table(name, folder)
    return folder


@pytest.fixture(scope="session")
def all_tables(tables: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Every table: those of the smoke suite's runs, and shipped suites and predictions as shipped, which
    tests/workflow/test_shipped.py makes anew."""
    if "PYTEST_XDIST_WORKER" not in os.environ:
        return _all(tables, tmp_path_factory.mktemp("all") / "tables")
    folder = tmp_path_factory.getbasetemp().parent / "all" / "tables"  # once for all that share the tests
    with folder.parents[1].joinpath("all.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        return folder if (folder / "claims.html").exists() else _all(tables, folder)


def _all(tables: Path, folder: Path) -> Path:
    shutil.copytree(tables, folder, dirs_exist_ok=True)  # of a process that failed
    predictions_as_shipped(CONFIG, folder)
    for name in [name for name in TABLES if name not in OF_RUNS]:
        shipped = REFERENCE / SUITE_OF[name] if name in SUITE_OF else folder
        write_table(name, shipped, folder)
    write_claims(ROOT / "config" / "claims.yaml", folder, folder, root=ROOT)
    return folder
