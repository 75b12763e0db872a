"""Table of config/README.md: the resources that each shipped suite requests from its cluster's Slurm."""

from pathlib import Path

from lowband.report.claim_views import markdown_table
from lowband.spec.config import Config

COLUMNS = (
    "suite", "cluster", "runs", "ranks", "nodes of a run", "tasks of a run", "minutes of a run",
    "hours of all runs", "node-hours of all runs",
)  # fmt: skip


def suites(root: Path) -> list[str]:
    """A row per suite of config/suites/: the most that one of its runs requests, and the totals."""
    config = Config(root)
    return markdown_table(COLUMNS, [_row(config, suite) for suite in config.suites])


def _row(config: Config, suite: str) -> list[str]:
    specs = config.runs([suite])
    cluster = specs[0].machine.name
    row = [f"`{suite}`", f"`{cluster}`", f"{len(specs)}", f"{max(spec.ranks for spec in specs):,}"]
    if not config.has_slurm(cluster):
        return [*row, *["-"] * (len(COLUMNS) - len(row))]
    job = config.job(cluster)
    asked = [(spec, job.resources(spec)) for spec in specs]
    nodes, minutes = ([int(resources[key]) for _, resources in asked] for key in ("nodes", "runtime"))
    return [
        *row,
        f"{max(nodes)}",
        f"{max(int(resources['nodes']) * job.tasks_per_node(spec) for spec, resources in asked)}",
        f"{max(minutes)}",
        f"{sum(minutes) / 60:.1f}",
        f"{sum(n * m for n, m in zip(nodes, minutes, strict=True)) / 60:.1f}",
    ]
