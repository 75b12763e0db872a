"""How much of today's code the shipped rows measured.

    python -m tests.age

For each folder of results/reference and each commit that its rows name: the rows, and the share of today's
lines of the measured part of the package that existed at that commit. Lines are compared by content
(`git blame -w -M -C`): one that was moved to another file, or indented again, is not a new line.
"""

import re
import sys
from collections import Counter
from functools import cache

from tests.checkout import REFERENCE
from tests.named_commits import CAMPAIGN, TABLE, ancestors, found_in, git, no_history, of_file

_ENGINE, _PACKAGE = "src/lowband/engine", "src/lowband"
_EVIDENCE = "src/lowband/evidence"
_PREDICTOR = ("src/lowband/predict", "src/lowband/cost", f"{_EVIDENCE}/validation")
# What the rows of a folder, or of one of its tables, measured; the longest prefix of a table's name counts.
MEASURED: dict[str, tuple[str, ...]] = {
    "anchors/": (_ENGINE, "src/lowband/run"),
    "box/": (_ENGINE, "src/lowband/box"),
    "axes-peers/": (_ENGINE, "src/lowband/trainers"),
    "box-axes/": (_ENGINE, "src/lowband/box"),
    "box-tensor/": (_ENGINE, "src/lowband/box"),
    "learning-rates/": (_ENGINE,),
    "lengths/": (_ENGINE, "src/lowband/box"),
    "box-context/": (_ENGINE, "src/lowband/box"),
    "box-bench/comm.csv": ("src/lowband/box", "src/lowband/bench/comm.py"),
    "box-bench/jobs.csv": ("src/lowband/box", "src/lowband/run", "workflow"),
    "box-lanes/": (_ENGINE, "src/lowband/box"),
    "compile/": (_ENGINE,),
    "convergence/": (_ENGINE,),
    "decentralised/": (_ENGINE,),
    "delay/": (_ENGINE,),
    "disk/": (_ENGINE,),
    "experts/": (_ENGINE,),
    "faults/": (_ENGINE, "src/lowband/run"),
    "fuzz/": ("src/lowband/spec", f"{_EVIDENCE}/importers", "src/lowband/commands"),
    "h100/": (_ENGINE,),
    "h100-host/": (_ENGINE,),
    "h100/kernels.csv": ("src/lowband/kernels",),
    "h200/kernels.csv": ("src/lowband/kernels",),
    "joined/": (_ENGINE,),
    "saved/": (_ENGINE,),
    "kernels/": ("src/lowband/kernels",),
    "load/": ("src/lowband/spec", f"{_EVIDENCE}/tables", f"{_EVIDENCE}/importers", "workflow"),
    "local/": (_ENGINE,),
    "local/disk.csv": (_PACKAGE,),
    "mutants/": (
        *(f"src/lowband/{name}" for name in ("spec", "cost", "predict", "engine")),
        f"{_EVIDENCE}/claims",
        f"{_EVIDENCE}/tables",
    ),
    "one-byte/": (_ENGINE,),
    "optimizers/": (_ENGINE,),
    "orders/": (_ENGINE,),
    "padding/": ("src/lowband/run/padded_experts.py",),
    "peers-host/": (_ENGINE, "src/lowband/trainers"),
    "peers/": (_ENGINE, "src/lowband/trainers"),
    "pipeline/": (_ENGINE,),
    "predicted/": _PREDICTOR,
    "products/": ("src/lowband/bench/products.py", "src/lowband/cost/products.py"),
    "random/": (_ENGINE,),
    "rejoin/": (_ENGINE,),
    "late/": (_ENGINE,),
    "routes/": (_ENGINE, "src/lowband/box"),
    "schedules/": (_ENGINE,),
    "seldom-peers/": (_ENGINE, "src/lowband/trainers"),
    "shaky/": (_PACKAGE,),
    "softmax/": tuple(
        f"src/lowband/{name}"
        for name in ("bench/softmax.py", "kernels/softmax_cpu.py", "kernels/softmax_cpu.c")
    ),
    "start/": (_ENGINE,),
    "stragglers/": (_ENGINE, "src/lowband/run"),
    "twice/": (_PACKAGE,),
    "wan/": (_ENGINE, "src/lowband/box"),
    "workflow/": ("Snakefile", "workflow"),
}  # fmt: skip


def measured_part(name: str) -> tuple[str, ...]:
    """Folders and files of the package that a table's rows measured. name: below results/reference"""
    if name in (TABLE, CAMPAIGN):
        return (_PACKAGE,)
    return MEASURED[max((prefix for prefix in MEASURED if name.startswith(prefix)), key=len)]


@cache
def origins(part: str) -> Counter[str]:
    """Today's lines of a folder or file by the commit that brought them."""
    lines: Counter[str] = Counter()
    for file in git("ls-files", "--", part).splitlines():
        blamed = git("blame", "-w", "-M", "-C", "--line-porcelain", "HEAD", "--", file)
        lines.update(re.findall(r"^([0-9a-f]{40}) \d+ \d+", blamed, re.MULTILINE))
    return lines


@cache
def _before(commit: str) -> frozenset[str]:
    return ancestors(commit)


def share(parts: tuple[str, ...], commit: str) -> float:
    """Of today's lines of these folders and files those that existed at the commit."""
    lines = sum((origins(part) for part in parts), Counter())
    return sum(lines[origin] for origin in _before(commit) & lines.keys()) / lines.total()


def main() -> int:
    reason = no_history()
    if reason:
        print(f"tests.age: {reason}", file=sys.stderr)
        return 1
    history = ancestors()
    rows: dict[tuple[str, tuple[str, ...]], Counter[str]] = {}
    for path in sorted(REFERENCE.rglob("*.csv")):
        name = path.relative_to(REFERENCE).as_posix()
        if name not in (TABLE, CAMPAIGN):
            folder = path.parent.relative_to(REFERENCE).as_posix()
            rows.setdefault((folder, measured_part(name)), Counter()).update(of_file(path))
    for (folder, parts), commits in rows.items():
        print(f"{folder}: of {sum(map(_lines, parts)):,} lines of {', '.join(parts)}")
        for commit, count in commits.most_common():
            whole = found_in(history, commit)
            existed = f"{share(parts, whole):4.0%}" if whole else "not in this history"
            print(f"    {commit[:7]} {count or 'some':>6} rows  {existed}", flush=True)
    return 0


def _lines(part: str) -> int:
    return origins(part).total()


if __name__ == "__main__":
    sys.exit(main())
