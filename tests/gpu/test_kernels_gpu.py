"""The cases of tests/kernels on a GPU, bf16 included."""

from pathlib import Path

import pytest
import torch
from inner import CASES, run_cases

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA or ROCm device"),
]


@pytest.mark.parametrize("file", CASES, ids=lambda file: file.stem)
def test_on_the_gpu(file: Path) -> None:
    run_cases(file, "gpu")
