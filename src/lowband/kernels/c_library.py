"""This package's C code, compiled with the machine's own compiler when a process first uses it.

Installing the package needs no build step and ships no binary: the library is built in a temporary folder
(about a second) and loaded, and the folder is removed. Linux reports the processor's features.
"""

import ctypes
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path
from typing import NamedTuple

from lowband.errors import UserError

COMPILERS = ("gcc", "clang", "cc")
TIMEOUT_S = 60


class Compiler(NamedTuple):
    """A C compiler: its path and the first line that `--version` prints."""

    path: str
    version: str


@cache
def compiler() -> Compiler:
    """The first of COMPILERS that is installed and runs. Raises UserError if none does."""
    for name in COMPILERS:
        path = shutil.which(name)
        if path is not None and (version := _run([path, "--version"])).returncode == 0:
            return Compiler(path, version.stdout.splitlines()[0])
    raise UserError("no C compiler", allowed=COMPILERS)


def build(source: Path, flags: tuple[str, ...], library: Path) -> None:
    """Compile a C file into a shared library. Raises UserError with the compiler's first error."""
    done = _run([compiler().path, *flags, "-shared", "-fPIC", "-o", str(library), str(source), "-lm"])
    if done.returncode != 0:
        lines = [line for line in done.stderr.splitlines() if "error" in line] or [f"exit {done.returncode}"]
        raise UserError(f"does not compile here: {lines[0].strip()}", where=source)


@cache
def load(source: Path, flags: tuple[str, ...]) -> ctypes.CDLL:
    """The library of a C file, built for this process. Raises UserError if it cannot be built or loaded."""
    try:
        with tempfile.TemporaryDirectory(prefix="lowband-") as folder:
            library = Path(folder) / f"{source.stem}.so"
            build(source, flags, library)
            return ctypes.CDLL(str(library))  # stays mapped after its file is removed
    except OSError as error:
        raise UserError(f"cannot be loaded: {error}", where=source) from None


@cache
def processor_features() -> frozenset[str]:
    """The processor's features by Linux's names (`avx2`, `fma`); empty on other systems."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return frozenset()
    flags = [line.partition(":")[2].split() for line in lines if line.startswith("flags")]
    return frozenset(flags[0]) if flags else frozenset()


def _run(command: list[str]) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired:
        raise UserError(f"took more than {TIMEOUT_S} s", where=command[0]) from None
