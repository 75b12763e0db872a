"""Time that Slurm and Snakemake add to a run in a box: medians over jobs of the parts of box.jobs.JobTime."""

import pandas as pd

PARTS = ["waited_s", "before_s", "after_s", "added_s", "wall_s"]


def build(jobs: pd.DataFrame) -> pd.DataFrame:
    """One row per number of ranks."""
    table = jobs.groupby(["ranks", "nodes"])[PARTS].median().reset_index()
    table.insert(0, "provenance", "measured")
    table["jobs"] = jobs.groupby(["ranks", "nodes"]).size().to_numpy()
    return table
