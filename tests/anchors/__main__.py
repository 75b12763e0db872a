"""`python -m tests.anchors`: the same faults, and the same checkpoints, under lowband and under its peers.

python -m tests.anchors faults --out results/reference/anchors
python -m tests.anchors checkpoints --out results/reference/anchors

Rows that the folder has already are kept. Links of one's own need root.
"""

import argparse
import multiprocessing
import sys
from collections.abc import Iterator
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from lowband.box import links
from tests.anchors import checkpoints
from tests.anchors.running import Failed
from tests.anchors.systems import SYSTEMS
from tests.anchors.trial import ATTEMPTS, FAULTS, Row, trial
from tests.campaign_rows import Rows, commit, write, write_environment

Case = tuple[str, str, int, int]  # system, fault, ranks, repeat


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.anchors", description=__doc__.split("\n")[0])
    parser.add_argument("what", choices=["faults", "checkpoints"])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument(
        "--out", type=Path, required=True, help="folder of anchor_<what>.csv, told/, env.json"
    )
    options = parser.parse_args()
    write_environment(options.out)
    if options.what == "faults":
        _faults(options.out, options.repeats)
    else:
        _checkpoints(options.out, options.repeats)
    return 0


def cases(repeats: int, is_root: bool) -> Iterator[Case]:
    """4 ranks before 8; links, and the launcher that restarts by itself, on 4 alone."""
    for ranks in (4, 8):
        for repeat in range(1, repeats + 1):
            for fault in FAULTS:
                for name, system in SYSTEMS.items():
                    if fault == "cut link" and (not is_root or system.restarts):
                        continue
                    if ranks == 4 or not (fault == "cut link" or system.restarts):
                        yield name, fault, ranks, repeat


def _faults(out: Path, repeats: int) -> None:
    """The systems side by side, each in a process of its own: most of a trial is waiting."""
    key = ("system", "fault", "ranks", "repeat")
    rows = Rows(out / "anchor_faults.csv", (*Row._fields, "commit"), key)
    if reason := links.missing():
        print(f"no faults of links: {reason}")
    left = [case for case in cases(repeats, not reason) if not rows.has(*case)]
    readers: list[Connection] = []
    for script in dict.fromkeys(system.script for system in SYSTEMS.values()):
        reader, writer = multiprocessing.Pipe(duplex=False)
        mine = [case for case in left if SYSTEMS[case[0]].script == script]
        multiprocessing.get_context("fork").Process(target=_trials, args=(mine, writer)).start()
        writer.close()
        readers.append(reader)
    while readers:
        for reader in wait(readers):
            assert isinstance(reader, Connection)
            try:
                row, output = reader.recv()
            except EOFError:
                readers.remove(reader)
                continue
            print(*row, sep=" | ", flush=True)
            rows.add(row._asdict())
            if row.repeat == 1:
                _write_told(out / "told", row, output)


def _trials(cases: list[Case], writer: Connection) -> None:
    for case in cases:
        for _ in range(ATTEMPTS):
            try:
                writer.send(trial(*case))
                break
            except Failed as error:  # on a machine so busy that ranks give each other up
                print(f"{case}: {error}", file=sys.stderr, flush=True)


def _write_told(folder: Path, row: Row, output: str) -> None:
    """What was printed after the fault."""
    folder.mkdir(exist_ok=True)
    name = f"{row.system}-{row.fault}-{row.ranks}".replace(" ", "-").replace("+", "and")
    (folder / f"{name}.txt").write_text(output, encoding="utf-8")


def _checkpoints(out: Path, repeats: int) -> None:
    path = out / "anchor_checkpoints.csv"
    rows: list[dict[str, Any]] = []
    for row in checkpoints.bench(repeats):
        print(*row, sep=" | ", flush=True)
        rows.append(row._asdict() | {"commit": commit()})
        write(path, (*checkpoints.Row._fields, "commit"), rows)


if __name__ == "__main__":
    sys.exit(main())
