"""Where the cases run: KERNELS_ON=interpreter (the default) or gpu. Imported before any kernel."""

import os

import pytest

ON_GPU = os.environ.get("KERNELS_ON") == "gpu"
os.environ["TRITON_INTERPRET"] = "0" if ON_GPU else "1"

import torch  # noqa: E402

# The interpreter holds bf16 as integers: loads are right, arithmetic and stores silently wrong.
ONLY_ON_GPU = pytest.mark.skipif(not ON_GPU, reason="bf16 is wrong under Triton's interpreter")
ONLY_INTERPRETED = pytest.mark.skipif(ON_GPU, reason="for the interpreter")
BF16 = pytest.param(torch.bfloat16, marks=ONLY_ON_GPU)
