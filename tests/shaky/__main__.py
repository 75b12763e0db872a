"""`python -m tests.shaky`: tests again and again on a busy machine, a row for each group and round.

python -m tests.shaky --rounds 10 --loops 4 --out results/reference/shaky
python -m tests.shaky --rounds 2 --loops 2 --fast --out results/reference/shaky

Loops that do nothing but compute run beside the tests, at the same priority. Tests that time real messages
are left out: `make test` runs these alone. Rows that the folder has already are kept: a campaign that was cut
goes on.
"""

import argparse
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from xml.etree import ElementTree

from lowband.run.environment import code_version
from tests import campaign_rows
from tests.shaky.groups import FORMERLY_FRAGILE

COLUMNS = ["round", "loops", "group", "tests", "skipped", "failed", "which", "seconds", "commit"]
FAST = "the fast part"
COMMAND = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
ONE_PROCESS = ["-m", "not timed"]
FAST_PART = [
    "-n",
    "2",
    "--dist",
    "loadfile",
    "--no-loadscope-reorder",
    "-m",
    "not slow and not waits and not timed",
]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.shaky", description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, required=True, help="how often each group runs")
    parser.add_argument("--loops", type=int, required=True, help="busy loops beside the tests")
    parser.add_argument(
        "--fast", action="store_true", help="all tests that are not slow, in place of the groups"
    )
    parser.add_argument("--out", type=Path, required=True, help="folder of rounds.csv")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    file = options.out / "rounds.csv"
    rows = campaign_rows.read(file)
    done = {(int(row["round"]), int(row["loops"]), row["group"]) for row in rows}
    groups = (
        {FAST: FAST_PART} if options.fast else {k: [*ONE_PROCESS, *v] for k, v in FORMERLY_FRAGILE.items()}
    )
    with busy(options.loops):
        for at in range(options.rounds):
            for group, arguments in groups.items():
                if (at, options.loops, group) in done:
                    continue
                row = {"round": at, "loops": options.loops, "group": group, **tried(arguments)}
                print(*row.values(), sep=" | ", flush=True)
                rows.append(row)
                campaign_rows.write(file, COLUMNS, rows)
    return int(any(int(row["failed"]) for row in rows))


@contextmanager
def busy(loops: int) -> Iterator[None]:
    """So many processes that compute without end."""
    running = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(loops)]
    try:
        yield
    finally:
        for process in running:
            process.kill()
            process.wait()


def tried(arguments: list[str]) -> dict[str, object]:
    """Counts of one pytest."""
    start, (commit, is_dirty) = time.monotonic(), code_version()
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        ended = subprocess.run([*COMMAND, *arguments, f"--junitxml={report}"], capture_output=True, text=True)
        if not report.exists():
            sys.exit(ended.stdout + ended.stderr)
        cases = list(ElementTree.parse(report).getroot().iter("testcase"))
    wrong = [case for case in cases if case.find("failure") is not None or case.find("error") is not None]
    if wrong:
        print(ended.stdout)
    return {
        "tests": len(cases), "skipped": sum(case.find("skipped") is not None for case in cases),
        "failed": len(wrong), "which": " ".join(case.get("name", "") for case in wrong),
        "seconds": f"{time.monotonic() - start:.0f}", "commit": commit + ("-dirty" if is_dirty else ""),
    }  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
