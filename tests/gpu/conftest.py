"""GPU tests fork their ranks, so the test process must not initialise CUDA: availability is asked of NVML."""

import os
import sys
from importlib.util import find_spec
from pathlib import Path

os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
# A bare GPU machine may lack what specs are read with: the kernels' tests need neither.
collect_ignore = [] if find_spec("pydantic") and find_spec("yaml") else ["test_engine_gpu.py"]
for helpers in ("dist", "kernels"):
    sys.path.insert(0, str(Path(__file__).parents[1] / helpers))
