"""Run the cases of a kernel in a process of its own.

Triton reads TRITON_INTERPRET when a kernel is defined, and the process of the other tests must never run
autograd (lowband.run.on_ranks). So the files of cases/ are no tests to pytest's own search.
"""

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

CASES = sorted(
    path for path in (Path(__file__).parent / "cases").glob("*.py") if path.stem not in ("common", "conftest")
)
TIME_LIMIT_S = 1500


def run_cases(file: Path, where: str) -> None:
    """where: interpreter | gpu. Fails with the report of the cases that failed."""
    interpret = "0" if where == "gpu" else "1"
    # On a GPU hundreds of variants are compiled first, each on one core.
    parallel = ["-n", str(min(8, os.cpu_count() or 1))] if where == "gpu" and find_spec("xdist") else []
    result = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--tb=short", *parallel, str(file)],
        env={**os.environ, "KERNELS_ON": where, "TRITON_INTERPRET": interpret, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=TIME_LIMIT_S,
    )
    assert result.returncode == 0, result.stdout[-8000:] + result.stderr[-2000:]
    assert " passed" in result.stdout
