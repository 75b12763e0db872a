"""Resources that experiments need, as shipped runs and a shipped set-up used them (docs/running.md)."""

from pathlib import Path

import pandas as pd

from lowband.evidence.claims.experiments import read_experiments
from lowband.evidence.report.claim_views import minutes
from lowband.evidence.report.writers import markdown
from lowband.spec.csv_tables import read_table

DISK = "results/reference/local/disk.csv"  # output of `du`: kib, path


def needs(root: Path) -> list[str]:
    """A row per experiment with shipped runs, then a sentence about disk space."""
    config = root / "config"
    rows = [
        {
            "command": f"`{experiment.command}`",
            "machine": experiment.hardware,
            "minutes": minutes(experiment.minutes(config) or 0),
            "memory (GiB, at most)": f"{experiment.memory_gib(config) or 0:.1f}",
        }
        for experiment in read_experiments(config).values()
        if experiment.measured is not None
    ]
    return [*markdown(pd.DataFrame(rows)), "", disk(root)]


def disk(root: Path) -> str:
    """A sentence about disk space. root: the folder that holds results/"""
    gib = read_table(root / DISK).set_index("path")["kib"] / 2**20
    written = gib.drop(".venv")  # folders named after the reproduction: results/<name>, ...
    return (
        f"Disk: {gib['.venv']:.1f} GiB for the set-up (several more where pip brings a CUDA build of torch), "
        f"{written.sum():.2f} GiB for what `make reproduce` writes."
    )
