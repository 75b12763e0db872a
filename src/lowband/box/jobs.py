"""Time that Slurm and Snakemake add to a run: rows of `jobs.csv`, from a query to the box's controller.

A box remembers ended jobs for a day (MinJobAge in slurm.py), and Snakemake names a job's run in its comment.
Slurm's times are whole seconds, so the time between two runs is accurate only over several runs.
"""

from datetime import datetime
from pathlib import Path
from typing import NamedTuple

from lowband.box import slurm, tools
from lowband.errors import UserError
from lowband.spec.records import Outcome
from lowband.spec.run import RunSpec
from lowband.spec.run_folder import RunFolder

_ENDED = "completed,failed,cancelled,timeout,node_fail"
# For each job: submission time, start, end, comment.
_QUERY = ["squeue", "--noheader", f"--states={_ENDED}", "--format=%V|%S|%e|%k"]


class JobTime(NamedTuple):
    """The times of one run's job.

    waited_s: from when it could start (it was submitted, and the job before it had ended) to its start
    before_s: from the job's start to the run's start: Snakemake in the job, srun, imports
    wall_s:   the run, from its outcome
    after_s:  from the run's outcome to the job's end
    added_s:  all of the above except the run
    """

    run_id: str
    ranks: int
    nodes: int
    waited_s: float
    before_s: float
    wall_s: float
    after_s: float
    added_s: float


def job_times(runs: Path) -> list[JobTime]:
    """The jobs of a folder's ok runs, in the order of their starts; the box ran one job at a time.

    runs: `results/<name>/runs`
    Raises UserError if there is no such folder, no controller answers, or no job of these runs has ended.
    """
    if not runs.is_dir():
        raise UserError("no such folder", where=runs, allowed="results/<name>/runs")
    folders = {path.name: RunFolder(path) for path in runs.iterdir() if (path / "outcome.json").exists()}
    rows: list[JobTime] = []
    free = 0.0
    for submitted, start, end, run in sorted(_ended_jobs(), key=lambda job: job[1]):
        ready, free = max(submitted, free), end
        folder = folders.get(run)
        outcome = Outcome.read_json(folder.outcome) if folder else None
        if folder is None or outcome is None or outcome.status != "ok":
            continue
        spec = RunSpec.read_json(folder.spec)
        written = folder.outcome.stat().st_mtime
        if not start <= written <= end + 1:  # an earlier job of a run that was run again
            continue
        waited, before, after = start - ready, written - outcome.wall_s - start, end - written
        nodes = -(-spec.ranks // spec.machine.node_size)
        added = waited + before + after
        rows.append(JobTime(spec.run_id, spec.ranks, nodes, waited, before, outcome.wall_s, after, added))
    if not rows:
        raise UserError("no ended job of a run", where=runs, allowed="runs that this box has trained")
    return rows


def _ended_jobs() -> list[tuple[float, float, float, str]]:
    """(submission, start, end, run) of every ended job; times in seconds since the epoch."""
    absent = slurm.missing()
    if absent:
        raise UserError(f"no Slurm here: {absent}")
    jobs = []
    for line in tools.run(_QUERY).splitlines():
        *times, comment = line.split("|", 3)
        if "N/A" not in times and "_wildcards_" in comment:
            submitted, start, end = (datetime.fromisoformat(time).timestamp() for time in times)
            jobs.append((submitted, start, end, comment.split("_wildcards_", 1)[1]))
    return jobs
