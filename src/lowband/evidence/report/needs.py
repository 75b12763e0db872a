"""Disk space that a reproduction needs, as the shipped set-up and results used it."""

from pathlib import Path

from lowband.spec.csv_tables import read_table

DISK = "results/reference/local/disk.csv"  # output of `du`: kib, path


def disk(root: Path) -> str:
    """A sentence about disk space. root: the folder that holds results/"""
    gib = read_table(root / DISK).set_index("path")["kib"] / 2**20
    written = gib.drop(".venv")  # folders named after the reproduction: results/<name>, ...
    return (
        f"Disk: {gib['.venv']:.1f} GiB for the set-up (several more where pip brings a CUDA build of torch), "
        f"{written.sum():.2f} GiB for what `make reproduce` writes."
    )
