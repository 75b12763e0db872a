"""`snakemake --profile slurm kernels` in a box: the kernels in C, as a job on one of its nodes."""

from pathlib import Path

import pytest
from commands import SNAKEMAKE, in_small_box

from lowband.spec.csv_tables import read_table

pytestmark = [pytest.mark.usefixtures("with_slurm"), pytest.mark.waits, pytest.mark.wide]


def test_kernels_are_measured_in_a_job_and_put_together(tree: Path) -> None:
    done = in_small_box(tree, *SNAKEMAKE, "kernels")
    assert "has been submitted with SLURM jobid" in done.stdout + done.stderr
    folder = tree / "results" / "faults" / "kernels"
    table, times = read_table(folder / "softmax.csv"), read_table(folder / "small-box" / "softmax_times.csv")
    table = table[table["provenance"] == "measured"]
    assert set(table["cluster"]) == {"small-box"}
    assert len(table) > 20
    measured = times.groupby(["isa", "algorithm", "elements"])["time_s"].median()
    for row in table.dropna(subset=["time_s"]).itertuples():
        assert row.time_s == pytest.approx(measured[row.isa, row.algorithm, row.elements])
