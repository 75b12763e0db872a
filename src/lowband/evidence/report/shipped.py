"""The shipped measurements -> every table, as a reproduction would have them. Nothing is run."""

import shutil
from pathlib import Path

from lowband.evidence.report.claim_views import write_claims
from lowband.evidence.tables.build import SUITE_OF, write_table
from lowband.evidence.tables.entries import TABLES
from lowband.evidence.validation.tables import write_predicted
from lowband.spec.config import Config

RAW = ("runs", "steps", "bytes", "states")  # written by `lowband collect` for the shipped reproduction


def write_shipped_tables(root: Path, out: Path) -> None:
    """Raw, predicted and derived tables and the graded claims, from `root`/results/reference into `out`."""
    reference = root / "results" / "reference"
    out.mkdir(parents=True, exist_ok=True)
    for name in RAW:
        shutil.copyfile(reference / "local" / "tables" / f"{name}.csv", out / f"{name}.csv")
    write_predicted(Config(root), out)
    for name in TABLES:
        write_table(name, reference / SUITE_OF[name] if name in SUITE_OF else out, out, root)
    write_claims(root / "config" / "claims.yaml", out, out, root=root)
