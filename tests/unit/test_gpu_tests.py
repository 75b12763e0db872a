"""tests/gpu: collected and skipped without a GPU; on a GPU that lacks a package, a failure."""

import subprocess
import sys

from tests.called import called

# A GPU that is not there, on a machine without pydantic.
BARE_GPU = """
import sys, pytest, torch
torch.cuda.is_available = lambda: True
sys.modules["pydantic"] = None
sys.exit(pytest.main(["-q", "-p", "no:cacheprovider", "tests/gpu/test_engine_gpu.py"]))
"""


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return called(sys.executable, *arguments, timeout=200, CUDA_VISIBLE_DEVICES="")


def test_without_a_gpu_all_are_skipped() -> None:
    done = run("-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/gpu")
    assert done.returncode == 0, done.stdout
    for module in ("engine", "kernels", "streams"):
        assert f"tests/gpu/test_{module}_gpu.py" in done.stdout
    assert "passed" not in done.stdout


def test_on_a_gpu_what_is_skipped_has_failed() -> None:
    done = run("-c", BARE_GPU)
    assert done.returncode == 1, done.stdout
    assert "1 skipped on a GPU, which counts as failed: tests/gpu/test_engine_gpu.py" in done.stdout
