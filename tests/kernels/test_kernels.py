"""Every Triton kernel under Triton's interpreter, on the CPU. tests/gpu runs the same cases on a GPU."""

from pathlib import Path

import pytest
from inner import CASES, run_cases


@pytest.mark.parametrize("file", CASES, ids=lambda file: file.stem)
def test_under_the_interpreter(file: Path) -> None:
    run_cases(file, "interpreter")
