"""Where the cases run: KERNELS_ON=interpreter (with TRITON_INTERPRET=1; the default) or gpu. See inner.py.

Nothing is set here: pytest imports this folder's conftest.py in the process of all tests.
"""

import os

import pytest
import torch

ON_GPU = os.environ.get("KERNELS_ON") == "gpu"


# The interpreter holds bf16 as integers: loads are right, arithmetic and stores silently wrong.
ONLY_ON_GPU = pytest.mark.skipif(not ON_GPU, reason="bf16 is wrong under Triton's interpreter")
ONLY_INTERPRETED = pytest.mark.skipif(ON_GPU, reason="for the interpreter")
BF16 = pytest.param(torch.bfloat16, marks=ONLY_ON_GPU)
