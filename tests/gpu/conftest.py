"""GPU tests fork their ranks, so the test process must not initialise CUDA: availability is asked of NVML.

On a GPU a test skipped here is a failure: something is missing, and the run would look green without it.
"""

import os
import sys
from pathlib import Path

import pytest
import torch

os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
HERE = Path(__file__).parent
for helpers in ("dist", "kernels"):
    sys.path.insert(0, str(HERE.parent / helpers))


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    here = HERE.relative_to(session.config.rootpath).as_posix()
    names = [report.nodeid for report in reporter.stats.get("skipped", ())]
    skipped = [name for name in names if name.startswith(here)]
    if skipped and torch.cuda.is_available():
        line = f"{len(skipped)} skipped on a GPU, which counts as failed: {skipped[0]} ..."
        reporter.write_line(line, red=True)
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
