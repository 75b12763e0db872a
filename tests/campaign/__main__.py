"""`python -m tests.campaign`: the shipped measurements of one commit, each part committed as it ends.

python -m tests.campaign --list
python -m tests.campaign --minutes 120 --only box peers

Measured is a commit that has landed, in a work tree of its own (build/campaign), and the rows go into
results/reference of this tree. The same command goes on where it was cut, today or on another day.
"""

import argparse
import fcntl
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from lowband.commands import positive
from lowband.errors import UserError
from lowband.evidence.claims.experiments import read_experiments
from lowband.spec.files import write_whole
from tests.campaign.landing import CAMPAIGN, IN_TREE, check, put, tables
from tests.campaign.measuring import WORK, Measurement, checked_out
from tests.campaign.parts import PARTS, Part
from tests.campaign_rows import read
from tests.checkout import ROOT
from tests.named_commits import git, no_history

BEGUN = WORK / "commit"  # of the campaign that was begun here last


def main(arguments: Sequence[str] | None = None, root: Path = ROOT, parts: Mapping[str, Part] = PARTS) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.campaign", description=__doc__.split("\n")[0])
    parser.add_argument("--list", action="store_true", help="only say what is done, and what the rest takes")
    parser.add_argument("--only", nargs="+", default=list(parts), metavar="PART", help="these parts")
    parser.add_argument(
        "--minutes", type=positive, default=float("inf"), help="begin nothing that takes longer"
    )
    parser.add_argument("--commit", help="the commit to measure (default: that of the last start, else HEAD)")
    options = parser.parse_args(arguments)
    ends = time.monotonic() + 60 * options.minutes
    try:
        if unknown := [name for name in options.only if name not in parts]:
            raise UserError(f"no part '{unknown[0]}'", where="--only", allowed=parts)
        if reason := no_history(root):
            raise UserError(reason, where=root)
        commit = _commit(options.commit, root)
        of_each = {name: _measurement(root, commit, name, parts[name]) for name in options.only}
        _list(root, commit, of_each)
        if options.list:
            return 0
        with _alone(root):
            return _campaign(root, commit, of_each, ends)
    except UserError as error:
        print(f"tests.campaign: {error}", file=sys.stderr)
    except subprocess.CalledProcessError as error:
        said = (error.stderr.strip().splitlines() or [f"exit code {error.returncode}"])[-1]
        print(f"tests.campaign: {' '.join(error.cmd[3:5])}: {said}", file=sys.stderr)
    except KeyboardInterrupt:
        print("tests.campaign: interrupted; the same command goes on", file=sys.stderr)
        return 128 + signal.SIGINT
    return 2


def _campaign(root: Path, commit: str, of_each: Mapping[str, Measurement], ends: float) -> int:
    if changed := git("status", "--porcelain", "--untracked-files=no", root=root):
        raise UserError("changed", where=changed.split()[1], allowed="a tree without changes")
    check(root, commit)
    write_whole(root / BEGUN, f"{commit}\n")
    checked_out(root, commit)
    left = 0
    for name, made in of_each.items():
        if _is_done(root, commit, name):
            continue
        try:
            made.prepare()
            tables(root, made)  # what will not fit is refused now and not in the end
            wrong = made.measure(ends) or [put(root, commit, made)]
        except UserError as error:
            wrong = [str(error)]
        left += not _is_done(root, commit, name)
        print("\n".join(f"{name}: {line}" for line in wrong), flush=True)
    return int(bool(left))


def _commit(asked: str | None, root: Path) -> str:
    last = (root / BEGUN).read_text(encoding="utf-8").strip() if (root / BEGUN).exists() else ""
    recorded = [row["commit"] for row in read(root / CAMPAIGN)]
    named = asked or last or (recorded or ["HEAD"])[-1]
    try:
        return git("rev-parse", "--verify", "--quiet", f"{named}^{{commit}}", root=root)
    except subprocess.CalledProcessError:
        raise UserError(f"no commit '{named}'", where="--commit", allowed="one of this history") from None


def _is_done(root: Path, commit: str, name: str) -> bool:
    return any((row["part"], row["commit"]) == (name, commit) for row in read(root / CAMPAIGN))


def _measurement(root: Path, commit: str, name: str, part: Part) -> Measurement:
    """With the seconds that it took: as a campaign recorded, by its rows in sum, or an experiment's."""
    took: dict[str, float] = {}
    folder = root / IN_TREE / part.folder
    for row in read(folder / "runs.csv") if part.suites else []:
        if part.has(row) and row["wall_s"]:
            took[row["run_id"]] = float(row["wall_s"])
    cases = [row for row in read(folder / part.table) if part.has(row)] if part.steps else []
    each = [*took.values(), *(float(row["seconds"] or 0) / part.at_once for row in cases if "seconds" in row)]
    recorded = [float(row["seconds"]) for row in read(root / CAMPAIGN) if row["part"] == name]
    if recorded or each:
        took[name] = recorded[-1] if recorded else sum(each)
    elif part.experiment:
        minutes = read_experiments(root / "config")[part.experiment].minutes(root / "config")
        took |= {name: 60 * minutes} if minutes else {}
    return Measurement(root / WORK / commit, name, part, took)


def _list(root: Path, commit: str, of_each: Mapping[str, Measurement]) -> None:
    print(f"campaign of {commit}")
    left_s, unknown = 0.0, []
    for name, made in of_each.items():
        jobs, seconds = made.jobs(), made.took.get(name)
        share = sum(job.has_ended() for job in jobs) / max(len(jobs), 1)
        state = f"{share:.0%} measured" if made.state()["sessions"] else "not begun"
        if _is_done(root, commit, name):
            share, state = 1.0, "done"
        left_s += (1 - share) * (seconds or 0.0)
        unknown += [name] if seconds is None and share < 1 else []
        hours = "not known" if seconds is None else f"{seconds / 3600:.2f} h"
        of_suites = " ".join(made.part.suites) + f", repeat {made.part.repeat}" * bool(made.part.repeat)
        what = f"suites {of_suites}" if made.part.suites else jobs[0].name
        what += f", and {len(jobs) - 1} more" if made.part.steps[1:] else ""
        alone = "alone, on a quiet machine" if made.part.is_alone else "beside others"
        print(f"{name:16} | {hours:9} | {alone:25} | {state:13} | {what}")
    others = f", and {', '.join(unknown)}, not known" if unknown else ""
    print(f"left: {left_s / 3600:.1f} h{others}", flush=True)


@contextmanager
def _alone(root: Path) -> Iterator[None]:
    lock = root / WORK / "lock"
    lock.parent.mkdir(parents=True, exist_ok=True)
    with lock.open("w") as file:
        os.set_inheritable(file.fileno(), True)  # what outlives a killed campaign still writes its rows
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError("another campaign runs in this tree", where=lock) from None
        yield


if __name__ == "__main__":
    for order in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(order) == signal.SIG_DFL:
            signal.signal(order, signal.default_int_handler)
    sys.exit(main())
