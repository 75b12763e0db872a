"""Table of config/README.md: the resources that each shipped suite requests from its cluster's Slurm."""

from pathlib import Path

import pandas as pd

from lowband.evidence.report.writers import markdown
from lowband.spec.config import Config


def suites(root: Path) -> list[str]:
    """A row per suite of config/suites/: the most that one of its runs requests, and the totals."""
    config = Config(root)
    return markdown(pd.DataFrame([_row(config, suite) for suite in config.suites]).fillna("-"))


def _row(config: Config, suite: str) -> dict[str, str]:
    specs = config.runs([suite])
    cluster = specs[0].machine.name
    row = {
        "suite": f"`{suite}`", "cluster": f"`{cluster}`", "runs": f"{len(specs)}",
        "ranks": f"{max(spec.ranks for spec in specs):,}",
    }  # fmt: skip
    if not config.has_slurm(cluster):
        return row
    job = config.job(cluster)
    asked = pd.DataFrame(job.resources(spec) for spec in specs)[["nodes", "runtime"]].astype(int)
    tasks = asked["nodes"] * [job.tasks_per_node(spec) for spec in specs]
    return {
        **row,
        "nodes of a run": f"{asked['nodes'].max()}",
        "tasks of a run": f"{tasks.max()}",
        "minutes of a run": f"{asked['runtime'].max()}",
        "hours of all runs": f"{asked['runtime'].sum() / 60:.1f}",
        "node-hours of all runs": f"{(asked['nodes'] * asked['runtime']).sum() / 60:.1f}",
    }
