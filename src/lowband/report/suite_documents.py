"""Table of config/README.md: the resources that each shipped suite requests from its cluster's Slurm."""

from pathlib import Path

from lowband.report.claim_views import markdown_table
from lowband.spec.job import has_slurm, read_job
from lowband.spec.suites import expand

COLUMNS = (
    "suite", "cluster", "runs", "ranks", "nodes of a run", "tasks of a run", "minutes of a run",
    "hours of all runs", "node-hours of all runs",
)  # fmt: skip


def suites(root: Path) -> list[str]:
    """A row per suite of config/suites/: the most that one of its runs requests, and the totals."""
    paths = sorted((root / "config" / "suites").glob("*.yaml"))
    return markdown_table(COLUMNS, [_row(root, path.stem) for path in paths])


def _row(root: Path, suite: str) -> list[str]:
    specs = expand(root, [suite])
    cluster = specs[0].machine.name
    row = [f"`{suite}`", f"`{cluster}`", f"{len(specs)}", f"{max(spec.ranks for spec in specs):,}"]
    if not has_slurm(root, cluster):
        return [*row, *["-"] * (len(COLUMNS) - len(row))]
    job = read_job(root, cluster)
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
