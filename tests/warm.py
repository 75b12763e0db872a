"""Python commands without the time that imports take: forked from a process that has imported them.

An interpreter that imports torch computes for 3 s before its first line, a rank of a peer for 4 to 5 s: tests
and campaigns would be nothing else. `Forked` forks this process, and in turn those that it starts: for
launchers, whose children must be their own. `begun` forks a server that has only imported, and so has no
threads.
"""

import multiprocessing
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

import torch

from tests import interpreter

_SERVER = multiprocessing.get_context("forkserver")  # one per session, started by the first process
_SERVER.set_forkserver_preload(["torch._dynamo", "lowband.run.on_ranks", "lowband.engine.jobs.quorum"])


def begun(words: Sequence[str | Path], output: Path) -> ForkServerProcess:
    """`python WORDS` (FILE|-m MODULE ...), forked from the server; what it prints goes to a file.

    Its environment is what this process had when the first one was begun.
    """
    process = _SERVER.Process(target=_print_to, args=(output, [sys.executable, *map(str, words)]))
    process.start()
    return process


def killed(process: ForkServerProcess) -> int | None:
    """Kill one that has not ended; its exit code.

    The server has waited for one that has: its pid may be that of any other process by now.
    """
    if process.exitcode is None:
        process.kill()
        process.join()
    return process.exitcode


def _print_to(output: Path, words: list[str]) -> None:
    file = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for own in (1, 2):
        os.dup2(file, own)
    os._exit(_run(words))


class Forked(subprocess.Popen[bytes]):
    """A Popen that forks where the command is `python [-u] FILE|-m MODULE ...`, or a script of its folder.

    It runs what the command names (runpy), in the environment and on the pipes that the launcher asked for.
    All else is as before: it is a child of the launcher with its own pid, that ends, is signalled and is
    waited for as any other (`subprocess.Popen`'s own code).
    """

    def _execute_child(self, args: Any, executable: Any, *others: Any) -> None:
        words = [str(word) for word in args] if isinstance(args, (list, tuple)) else []
        if not _is_python(words):
            return super()._execute_child(args, executable, *others)  # type: ignore[misc]
        cwd, env, pipes, start_new_session = others[3], others[4], others[8:14], others[19]
        sys.stdout.flush()
        sys.stderr.flush()
        self.pid = os.fork()
        if self.pid:
            self._child_created = True
            self._close_pipe_fds(*pipes)  # type: ignore[attr-defined]
            return None
        code = 1
        try:
            for fd, own in ((pipes[0], 0), (pipes[3], 1), (pipes[5], 2)):
                if fd != -1:
                    os.dup2(fd, own)
            os.closerange(3, os.sysconf("SC_OPEN_MAX"))  # a new process has none of its launcher's sockets
            if start_new_session:
                os.setsid()
            for number in (signal.SIGINT, signal.SIGTERM):
                signal.signal(
                    number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL
                )
            if cwd is not None:
                os.chdir(cwd)
            if env is not None:
                os.environ.clear()
                os.environ.update({os.fsdecode(key): os.fsdecode(value) for key, value in env.items()})
            code = _run(words)
        finally:
            os._exit(code)


def _is_python(words: list[str]) -> bool:
    return bool(words) and (
        words[0] == sys.executable or Path(words[0]).parent == Path(sys.executable).parent
    )


def _run(words: list[str]) -> int:
    """What the interpreter does with the command: returns its exit code."""
    subprocess.Popen = Forked  # type: ignore[misc]
    rest = words[1:] if words[0] == sys.executable else words
    rest = rest[1:] if rest[0] == "-u" else rest
    if threads := os.environ.get("OMP_NUM_THREADS"):  # torchrun's; torch has read it already
        torch.set_num_threads(int(threads))
    return interpreter.run(rest)
