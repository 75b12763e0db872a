"""Every Triton kernel under Triton's interpreter, on the CPU. tests/gpu runs the same cases on a GPU."""

from pathlib import Path

import pytest
from inner import CASES, run_cases

KERNELS = Path(__file__).parents[2] / "src" / "lowband" / "kernels"


def test_each_kernel_has_cases() -> None:
    kernels = {path.stem.removesuffix("_triton") for path in KERNELS.glob("*_triton.py")}
    assert kernels and kernels <= {path.stem for path in CASES}


@pytest.mark.parametrize("file", CASES, ids=lambda file: file.stem)
def test_under_the_interpreter(file: Path) -> None:
    run_cases(file, "interpreter")
