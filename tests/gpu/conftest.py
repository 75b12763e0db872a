"""GPU tests fork their ranks, so the test process must not initialise CUDA: availability is asked of NVML."""

import os
import sys
from pathlib import Path

os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
for helpers in ("dist", "kernels"):
    sys.path.insert(0, str(Path(__file__).parents[1] / helpers))
