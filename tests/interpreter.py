"""What `python` does with a command, in processes forked from one that has imported the packages in use.

A command of the workflow computes for one to three seconds before its first line, to import pandas,
matplotlib, Snakemake or torch; tests of the workflow start some hundred. `Warm` makes them a program
`python`. It hands command, folder, environment and pipes to a server, which forks; it ends as the fork ends,
and the fork as it does. The server imports nothing of lowband: each command reads the code of the tree that
it runs in. Commands that it is not for go to the interpreter.

Run as a file, `python -I interpreter.py SOCKET MODULE...` is that server, until its standard input is closed.
"""

import atexit
import contextlib
import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from types import TracebackType
from typing import NoReturn

SERVED = ("lowband", "papermill", "snakemake", "together")  # the modules whose commands are forked
MOST_BYTES = 2**20  # of a command with its environment
# -I -S: it starts in 20 ms, as it looks for nothing that is installed.
CLIENT = """#!{python} -IS
import json, os, signal, socket, sys
words = sys.argv[1:]
server = {folder!r} + ("/torch" if "train" in words[2:3] else "/plain")
if words[:1] != ["-m"] or words[1] not in {served!r} or not os.path.exists(server):
    os.execv({python!r}, [{python!r}, *words])
with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as to:
    to.connect(server)
    command = json.dumps([sys.argv, os.getcwd(), dict(os.environ)])
    socket.send_fds(to, [os.fsencode(command)], [0, 1, 2])
    code = int(to.recv(100) or -signal.SIGKILL)
if code < 0:
    signal.signal(-code, signal.SIG_DFL)
    os.kill(os.getpid(), -code)
sys.exit(code)
"""


class Warm:
    """A program `python`, at `path`, and its servers, of an environment's interpreter."""

    def __init__(self, python: str | Path = sys.executable) -> None:
        self._python = str(python)
        self._folder = TemporaryDirectory()
        self._servers: dict[str, subprocess.Popen[bytes]] = {}
        self.path = Path(self._folder.name, "python")
        self.path.write_text(CLIENT.format(python=self._python, folder=self._folder.name, served=SERVED))
        self.path.chmod(0o755)

    def serve(self, name: str, *modules: str) -> None:
        """From here on, fork commands from a process with these modules.

        name: `torch`, for `lowband train`, or `plain`, for the others
        """
        if name not in self._servers:
            command = [self._python, "-I", __file__, str(Path(self._folder.name, name)), *modules]
            self._servers[name] = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
            assert self._servers[name].stdout.readline() == b"ready\n"  # type: ignore[union-attr]

    def __enter__(self) -> "Warm":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for server in self._servers.values():
            server.communicate()
        self._folder.cleanup()


def run(words: Sequence[str]) -> int:
    """What the interpreter does with `FILE ...` or `-m MODULE ...`; returns its exit code."""
    sys.stdout, sys.stderr = os.fdopen(1, "w", closefd=False), os.fdopen(2, "w", 1, closefd=False)
    code = 0
    try:
        if words[0] == "-m":
            sys.argv = [*words[1:]]
            runpy.run_module(words[1], run_name="__main__", alter_sys=True)
        else:
            sys.argv = [*words]
            sys.path.insert(0, str(Path(words[0]).resolve().parent))
            runpy.run_path(words[0], run_name="__main__")
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
    except BaseException:
        code = 1
        sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]  # torch's adds the rank to each line
    threading._shutdown()  # type: ignore[attr-defined]  # waits for threads, as the interpreter does
    sys.stdout.flush()
    sys.stderr.flush()
    return code & 0xFF


def _serve(address: str, modules: Sequence[str]) -> None:
    for module in modules:
        importlib.import_module(module)
    gc.collect()
    gc.freeze()  # what the server has is not looked through, and so not copied, in every fork
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(address)
        listener.listen()
        print("ready", flush=True)
        while listener in select.select([0, listener], [], [])[0]:
            client, _ = listener.accept()
            if not os.fork():
                _attend(client)
            client.close()
            _reap(os.WNOHANG)
    _reap(0)


def _reap(options: int) -> None:
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, options)[0]:
            pass


def _attend(client: socket.socket) -> NoReturn:
    """Fork the client's command and tell it the exit code; end the command where the client has ended."""
    command, pipes, _, _ = socket.recv_fds(client, MOST_BYTES, 3)
    pid = os.fork()
    if not pid:
        os._exit(_become(*json.loads(os.fsdecode(command)), pipes))
    ended = os.pidfd_open(pid)
    if ended not in select.select([ended, client], [], [])[0]:
        os.kill(pid, signal.SIGTERM)
    _, status = os.waitpid(pid, 0)
    with contextlib.suppress(OSError):
        client.send(str(os.waitstatus_to_exitcode(status)).encode())
    os._exit(0)


def _become(words: Sequence[str], cwd: str, environment: dict[str, str], pipes: Sequence[int]) -> int:
    """Run the command as an interpreter in its folder and its environment, on its pipes."""
    for own, pipe in enumerate(pipes):
        os.dup2(pipe, own)
    os.closerange(3, os.sysconf("SC_OPEN_MAX"))
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(environment)
    sys.executable = words[0]
    sys.path[:0] = [cwd, *filter(None, environment.get("PYTHONPATH", "").split(os.pathsep))]
    sys.stdin = os.fdopen(0, closefd=False)
    atexit._clear()  # the server's
    code = run(words[1:])
    atexit._run_exitfuncs()
    return code


if __name__ == "__main__":
    _serve(sys.argv[1], sys.argv[2:])
