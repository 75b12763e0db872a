"""What becomes of one input: accepted, refused in one line that names its place, or a defect."""

import contextlib
import io
import re
import resource
import shutil
import signal
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lowband.errors import UserError
from tests.fuzz.target import Hang, Refused, Target

DEFECTS = ("traceback", "several lines", "too long", "no place", "hang", "memory", "crash")
OUTCOMES = ("accepted", "refused", *DEFECTS)
# Another file than the changed one, which no longer fits it; or an entry of one, by its name.
A_PLACE = re.compile(r"\w\.(yaml|jsonl?|csv)\b|^(scheme|model|machine) '")
UNFILED = ("command line", "environment")  # groups whose input is no file that a message could name
LONGEST, TIME_LIMIT_S, MEMORY_GIB = 5000, 10, 1
AGAIN_S = 0.01  # of the processor, after which a dropped Hang is raised again
# Of the processor, which other work on the machine does not lengthen; and, for one that waits, of the wall.
LIMITS = ((signal.SIGPROF, signal.ITIMER_PROF, 1), (signal.SIGALRM, signal.ITIMER_REAL, 30))


def prepared(target: Target, folder: Path) -> Path:
    """The folder that a target's calls are given, with all that they read but the file."""
    root = folder / "root"
    shutil.rmtree(root, ignore_errors=True)
    (root / target.file).parent.mkdir(parents=True)
    target.prepare(root)
    return root


def outcome(target: Target, data: bytes, folder: Path) -> tuple[str, str]:
    """One of OUTCOMES, and the message. folder: its `root` is made if it is missing"""
    root = folder / "root"
    if target.is_fresh or not root.is_dir():
        root = prepared(target, folder)
    (root / target.file).write_bytes(target.seal(data))
    printed = io.StringIO()
    try:
        with _within_limit(), contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(printed):
            target.call(root)
    except UserError as error:
        return _judged(str(error), target, root)
    except Refused:
        return _judged(printed.getvalue().rstrip("\n"), target, root)
    except Hang:
        return "hang", f"more than {TIME_LIMIT_S} s of the processor, or {30 * TIME_LIMIT_S} s"
    except MemoryError:
        return "memory", f"more than {MEMORY_GIB} GiB: {traceback.format_exc()}"
    except (Exception, SystemExit):
        return "traceback", traceback.format_exc()
    return "accepted", ""


def place(text: str) -> str:
    """Where a traceback ends: the last line of lowband's code in it, and the error; one defect."""
    lines = re.findall(r'File "[^"]*/(lowband/[^"]+)", line (\d+)', text)
    last = text.strip().splitlines()[-1] if text.strip() else ""
    return f"{':'.join(lines[-1]) if lines else '?'} {last.partition(':')[0]}"


@contextlib.contextmanager
def limit_memory() -> Iterator[None]:
    """At most MEMORY_GIB more than this process has now; beyond that, MemoryError."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
    limit = pages * resource.getpagesize() + MEMORY_GIB * 2**30
    resource.setrlimit(resource.RLIMIT_AS, (limit, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def _judged(message: str, target: Target, root: Path) -> tuple[str, str]:
    if len(message) > LONGEST:
        return "too long", message
    if "\n" in message:
        return "several lines", message
    names = (str(root), Path(target.file).name, Path(target.file).stem)
    is_placed = target.group in UNFILED or any(name in message for name in names) or A_PLACE.search(message)
    return ("refused" if is_placed else "no place"), message


@contextlib.contextmanager
def _within_limit() -> Iterator[None]:
    """The interpreter prints and drops what is raised in a finalizer or a weak reference's callback,
    where a signal may find the call as well as anywhere else. So a dropped Hang is raised again.
    """

    def expired(*_: object) -> None:
        raise Hang

    def dropped(what: Any) -> None:
        if issubclass(what.exc_type, Hang):
            signal.setitimer(signal.ITIMER_PROF, AGAIN_S)
        else:
            hook(what)

    hook, sys.unraisablehook = sys.unraisablehook, dropped
    for order, timer, limit in LIMITS:
        signal.signal(order, expired)
        signal.setitimer(timer, limit * TIME_LIMIT_S)
    try:
        yield
    finally:
        for _, timer, _ in LIMITS:
            signal.setitimer(timer, 0)
        sys.unraisablehook = hook
