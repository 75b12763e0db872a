"""`python -m tests.fuzz`: changed files for every parser, from fixed seeds; one row a parser.

python -m tests.fuzz --inputs 10000 --out results/reference/fuzz/inputs.csv
python -m tests.fuzz --target suite --seed 17

An input is sound if it is accepted, refused by one line that names the file, or, for a line of a foreign log,
reported with its number. Anything else is a defect: a traceback, a message of several lines or of more than
5,000 characters, more than ten seconds, more than 4 GiB.
"""

import argparse
import contextlib
import csv
import io
import random
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from lowband.engine.checkpoint.manifest import Damaged
from lowband.errors import UserError
from lowband.run.environment import code_version
from tests.fuzz.mutate import mutate
from tests.fuzz.sound import sound_run
from tests.fuzz.targets import Refused, Target, targets

OUTCOMES = ("accepted", "refused", "traceback", "several lines", "too long", "hang")
LONGEST, TIME_LIMIT_S, MEMORY_GIB = 5000, 10, 4
COLUMNS = ["parser", "inputs", *OUTCOMES, "processor_s", "commit"]


class Hang(BaseException):
    pass


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__.split("\n")[0])
    parser.add_argument("--inputs", type=int, default=1000, help="for each parser (default: 1000)")
    parser.add_argument("--first", type=int, default=0, help="the first seed (default: 0)")
    parser.add_argument("--target", help="one parser only")
    parser.add_argument("--seed", type=int, help="print the input of one seed and what happens")
    parser.add_argument("--out", type=Path, help="CSV, one row a parser")
    options = parser.parse_args()
    limit = MEMORY_GIB * 2**30
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    with tempfile.TemporaryDirectory() as folder:
        chosen = [t for t in all_targets(Path(folder) / "sound") if options.target in (None, t.name)]
        if options.seed is not None:
            [target] = chosen
            data = mutate(target.text, target.kind, random.Random(f"{target.name} {options.seed}"))
            sys.stdout.write(data.decode(errors="replace")[:3000] + "\n")
            print(*outcome(target, data, Path(folder)), sep="\n")
            return 0
        rows = [row(target, options.first, options.inputs, Path(folder)) for target in chosen]
    if options.out:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        with options.out.open("w", newline="") as file:
            writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
            writer.writeheader()
            writer.writerows(rows)
    return int(any(r[key] for r in rows for key in OUTCOMES[2:]))


def row(target: Target, first: int, inputs: int, folder: Path) -> dict[str, object]:
    counts: Counter[str] = Counter()
    start = time.process_time()
    for seed in range(first, first + inputs):
        data = mutate(target.text, target.kind, random.Random(f"{target.name} {seed}"))
        how, text = outcome(target, data, folder)
        counts[how] += 1
        if how not in OUTCOMES[:2] and counts[how] < 4:
            print(f"{target.name}, seed {seed}: {how}: {text[-300:]!r}", flush=True)
    spent = round(time.process_time() - start, 1)
    found = {
        "parser": target.name, "inputs": inputs, **{key: counts[key] for key in OUTCOMES},
        "processor_s": spent, "commit": code_version()[0],
    }  # fmt: skip
    print(*found.values(), flush=True)
    return found


def outcome(target: Target, data: bytes, folder: Path) -> tuple[str, str]:
    """One of OUTCOMES, and the message."""
    root = folder / "root"
    shutil.rmtree(root, ignore_errors=True)
    path = root / target.file
    path.parent.mkdir(parents=True)
    path.write_bytes(target.seal(data))
    printed = io.StringIO()
    try:
        with _within_limit(), contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(printed):
            target.call(root)
    except (UserError, Damaged) as error:
        return _judged(str(error))
    except Refused:
        return _judged(printed.getvalue().rstrip("\n"))
    except Hang:
        return "hang", f"more than {TIME_LIMIT_S} s"
    except (Exception, SystemExit):
        return "traceback", traceback.format_exc()
    return "accepted", ""


def _judged(message: str) -> tuple[str, str]:
    if len(message) > LONGEST:
        return "too long", message
    return ("several lines" if "\n" in message else "refused"), message


@contextlib.contextmanager
def _within_limit() -> Iterator[None]:
    def expired(*_: object) -> None:
        raise Hang

    signal.signal(signal.SIGALRM, expired)
    signal.setitimer(signal.ITIMER_REAL, TIME_LIMIT_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


def all_targets(folder: Path) -> list[Target]:
    """folder: receives a sound run"""
    return targets(*sound_run(folder / "run"))


if __name__ == "__main__":
    sys.exit(main())
